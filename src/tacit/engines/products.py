"""Per-record gradients of a matrix that enters a program by products or by look-ups.

A use of a (P, D) matrix has one of two factored forms, with T positions for each record:

  Dense    Σ_t b_t a_tᵀ, where y_t = W a_t and b_t is the cotangent of y_t;
  Lookup   Σ_t e(k_t) b_tᵀ, where y_t = W[k_t] and e(k) is the unit vector of row k.

A matrix may be used several times: at every step of a recurrence, or as an embedding and again as
the output head. A record's gradient is the sum over all uses. Uses of one form are concatenated
along T, and the two forms meet in a cross term. Rows that are too large to keep have norms alone,
which are never too small, whatever was rounded, and in whatever order.

**Sums.** With u the unit rounding, a sum of n terms rounds each term at most n − 1 times *in any
order*, so it is off by at most n·u times the sum of the terms' sizes. No bound here relies on the
order that a backend chooses within one sum, so a compiler that re-associates it (Inductor does)
changes nothing. Fusing a product and an addition only removes a rounding. Long sums are written
as sums of sums (blocks of about √n), which keeps n small; a compiler keeps those apart, because
each is a reduction of its own.

**Ghost norms.** ‖Σ_t b_t a_tᵀ‖² = Σ_{t,u} (a_t·a_u)(b_t·b_u)  [Li 2022]: 2T² numbers instead of
P·D. The terms may be huge and cancel, and a record may be built so that all roundings go one way.
With τ the least normal number and S = Σ_t ‖a_t‖‖b_t‖ the reach:

  a sum of products, each rounded at most n times on its way into it, is off by at most n·u times
  the sum of their sizes, and by Cauchy and Schwarz that is n·u·‖a_t‖‖a_u‖ for a_t·a_u;
  a product below τ may vanish, so a_t·a_u of width D also loses up to D·τ;
  over all t and u this makes (n_a + n_b)·u·S², D_a·τ·(Σ_t ‖b_t‖)² and D_b·τ·(Σ_t ‖a_t‖)²;
  adding up the T² terms makes n_Σ·u·S², and T²·τ where their products vanish;
  the share that is added is itself a sum over T positions, off by at most T·u·S.

`norms_from_grams` adds the vanished products and `safe_squares` the rest, so the result is never
below the square of the real share. Terms of second order are below (n_a + n_b + n_Σ)²·u²·S², which
for widths up to millions is less than the 16·u·S² that `Contracted` adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.engines import ghost_kernels as ghost
from tacit.engines.clipping import (
    RecordGradients,
    RowScale,
    Stacked,
    for_compiler,
    sum_of_squares,
)
from tacit.precision import uses_tf32, wide_together

_SMALL_STACK = 1 << 20  # numbers of a stack that a CPU keeps


@dataclass
class Contracted:
    """Norms alone; the total comes from one contraction of inputs and cotangents.

    A record's share of that contraction is not the vector whose norm was taken, as both were
    rounded. With S = Σ_t ‖a_t‖·‖b_t‖ over the record's positions t (the *reach*), the squared norm
    is off by at most γ·S² and the share by at most τ·S, so ‖share‖ ≤ √(norm² + γ·S²) + τ·S, which
    is what `squares` returns. `norm_squares_B` already allows for roundings that depend on sizes
    (see above); γ and τ cover what is left, a few roundings and terms of second order.

    TensorFloat-32 cuts each factor of a product to 10 bits, which adds 2·2⁻¹⁰·S for each matrix
    product that runs in it (`coarse_products`): one for the share, and one more where the norm is
    of rows that were computed in the same way.

    Args:
        norm_squares_B: ‖g_i‖², allowing for the roundings of its own computation.
        reach_B: S of each record, or None where it equals the norm (one position per record).
        total: from scales s to Σ s_i·g_i.
        rows: makes all g_i, stacked.
        coarse_products: how many matrix products between norm and share run in TensorFloat-32.
    """

    norm_squares_B: Tensor
    reach_B: Tensor | None
    total: Callable[[RowScale], Tensor]
    rows: Callable[[], Tensor]
    coarse_products: int = 0

    def squares(self) -> Tensor:
        rounding = torch.finfo(self.norm_squares_B.dtype).eps
        gamma = 8 * rounding
        tau = 8 * rounding + self.coarse_products * 2.0**-9
        if self.reach_B is None:
            return self.norm_squares_B * (((1 + gamma) ** 0.5 + tau) ** 2)
        norms, reach = self.norm_squares_B.clamp_min(0), self.reach_B
        upper = torch.addcmul(norms, reach, reach, value=gamma).sqrt()
        return torch.add(upper, reach, alpha=tau).square()


def piece(x_B: Tensor, part: slice) -> Tensor:
    """The records of one slice. Traced without a GPU, `x_B[part]` would ask for the device."""
    return x_B.narrow(0, part.start, part.stop - part.start)


def in_pieces(
    count: int, numbers_each: int, work: Callable[[slice], tuple[Tensor, ...]], limit: int = 1 << 27
) -> tuple[Tensor, ...]:
    """`work` on slices of `count` records that need at most `limit` numbers of workspace each."""
    size = max(1, limit // max(1, numbers_each))
    starts = range(0, count, size) or range(1)
    results = [work(slice(start, min(start + size, count))) for start in starts]
    return results[0] if len(results) == 1 else tuple(map(torch.cat, zip(*results, strict=True)))


def rows_are_kept(row: int, *factors: Tensor, times: int = 2) -> bool:
    """Whether to keep rows of `row` numbers, or norms alone: the one place that chooses.

    Rows that are not much larger than the factors they come from save a second contraction. On a
    CPU small stacks are kept too, as their norms need none of the slack of a ghost norm.
    """
    few = row <= times * sum(math.prod(x.shape[1:]) for x in factors)
    return few or (factors[0].device.type == "cpu" and len(factors[0]) * row <= _SMALL_STACK)


@dataclass(frozen=True)
class Gram:
    """x_t·x_u for all positions t, u of each record.

    Each is a sum of `width` products, and each product was rounded at most `depth` times.
    """

    inner_BTT: Tensor
    width: int
    depth: int

    @staticmethod
    def of(x_BTD: Tensor) -> Gram:
        width = x_BTD.shape[-1]
        return Gram(inner_products(x_BTD, x_BTD), width, dot_depth(width))


def inner_products(x_BTD: Tensor, y_BSD: Tensor) -> Tensor:
    """x_t·y_s of each record, (B, …, T, S), summed in blocks of `_block(D)` to round less."""
    lead, width = x_BTD.shape[:-2], x_BTD.shape[-1]
    block = _block(width)
    flat_x, flat_y = (x.reshape(math.prod(lead), *x.shape[-2:]) for x in (x_BTD, y_BSD))
    single = x_BTD.is_cuda and x_BTD.dtype == torch.float32
    if single and (uses_tf32("matmul", x_BTD) or not for_compiler()):
        # TensorFloat-32 keeps 10 bits, too few where terms cancel. This operator never uses it.
        total = ghost.inner_products(flat_x, flat_y, block)
    else:
        total = ghost.sum_of_products(flat_x, flat_y, block)
    return total.reshape(*lead, x_BTD.shape[-2], y_BSD.shape[-2])


def lengths(gram_BTT: Tensor, width: int) -> Tensor:
    """‖x_t‖ from above, even where squares vanished."""
    squares = gram_BTT.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    return (squares + width * torch.finfo(squares.dtype).tiny).sqrt()


def ghost_norms(a_BTD: Tensor, b_BTP: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norm from above, and the reach S, of each record.

    Dimensions between the first and the last two are groups, whose squares add up.
    """
    if a_BTD.shape[-2] == 1:  # ‖b aᵀ‖ = ‖a‖·‖b‖
        groups = a_BTD.shape[:-2]
        sides = (x.reshape(math.prod(groups), x.shape[-1]) for x in (a_BTD, b_BTP))
        a, b = (sum_of_squares(side).reshape(groups) for side in sides)
        return _over_groups(a * b), _over_groups((a * b).sqrt())
    if ghost.fits(a_BTD) and a_BTD.dim() == 3:
        return ghost.ghost_norms(a_BTD, b_BTP)
    return norms_from_grams(Gram.of(a_BTD), Gram.of(b_BTP))


def norms_from_grams(a: Gram, b: Gram) -> tuple[Tensor, Tensor]:
    """The same, from inner products."""
    positions = a.inner_BTT.shape[-1]
    depth = a.depth + b.depth + sum_depth(positions, positions)
    length_a, length_b = lengths(a.inner_BTT, a.width), lengths(b.inner_BTT, b.width)
    reach = (length_a * length_b).sum(dim=-1)
    tiny = torch.finfo(reach.dtype).tiny
    vanished = tiny * (
        a.width * length_b.sum(dim=-1).square()
        + b.width * length_a.sum(dim=-1).square()
        + positions**2
    )
    squares = sum_over_pairs(a.inner_BTT * b.inner_BTT) + vanished
    return _over_groups(safe_squares(squares, reach, depth, positions)), _over_groups(reach)


def _over_groups(x: Tensor) -> Tensor:
    """In float64: a layer may have hundreds of groups, whose sum must not round away a norm."""
    return x if x.dim() == 1 else x.flatten(1).sum(dim=1, dtype=torch.float64).to(x.dtype)


def safe_squares(squares: Tensor, reach: Tensor, depth: int, positions: int) -> Tensor:
    """(√(‖g‖² + depth·u·S²) + T·u·S)²: no less than the square of the share that is added."""
    unit = torch.finfo(squares.dtype).eps / 2
    upper = torch.addcmul(squares.clamp_min(0), reach, reach, value=depth * unit).sqrt()
    return torch.add(upper, reach, alpha=positions * unit).square()


def sum_over_pairs(terms_BTT: Tensor) -> Tensor:
    """Σ_{t,u}, first over one position and then over the other, each in blocks."""
    return _sum_in_blocks(_sum_in_blocks(terms_BTT))


def _sum_in_blocks(x: Tensor) -> Tensor:
    block = _summands(x.shape[-1])
    if x.shape[-1] <= block:
        return x.sum(dim=-1)
    return torch.stack([part.sum(dim=-1) for part in x.split(block, dim=-1)], dim=-1).sum(dim=-1)


def sum_depth(first: int, second: int) -> int:
    """The most roundings that a term of `sum_over_pairs` meets, in any order of each sum."""
    return sum(_summands(count) + math.ceil(count / _summands(count)) for count in (first, second))


def dot_depth(width: int) -> int:
    """The most roundings that a product meets in an inner product that is summed in blocks."""
    block = _block(width)
    return min(width, block) + math.ceil(width / block)


def _block(width: int) -> int:
    """At least √D, so that blocks meet no more roundings than the numbers within one."""
    return max(512 if for_compiler() else 128, 32 * math.ceil(math.sqrt(width) / 32))


def _summands(positions: int) -> int:
    """The block for sums over positions."""
    return max(64, 32 * math.ceil(math.sqrt(positions) / 32))


@dataclass(frozen=True)
class Dense:
    """Σ_t b_t a_tᵀ of each record."""

    a_BTD: Tensor
    b_BTP: Tensor

    def rows(self) -> Tensor:
        return self.b_BTP.transpose(1, 2) @ self.a_BTD

    def total(self, scale: RowScale) -> Tensor:
        b, a = scale.of(self.b_BTP), scale.present(self.a_BTD)
        return b.flatten(0, 1).T @ a.flatten(0, 1)

    def norms(self, part: slice) -> tuple[Tensor, Tensor]:
        """The squared norm from above, and the reach S, of some records."""
        return ghost_norms(piece(self.a_BTD, part), piece(self.b_BTP, part))


@dataclass(frozen=True)
class Lookup:
    """Σ_t e(k_t) b_tᵀ of each record, of a table with `num_rows` rows.

    Negative tokens count from the end, as in `table[tokens]`. For an embedding with a
    `padding_idx`, b must be zero at the positions that read it.
    """

    num_rows: int
    tokens_BT: Tensor
    b_BTD: Tensor

    def rows_read(self) -> Tensor:
        """Tokens from 0 to num_rows − 1, so that equal rows compare equal."""
        tokens = self.tokens_BT.long()
        return torch.where(tokens < 0, tokens + self.num_rows, tokens)

    def rows(self) -> Tensor:
        index = self.rows_read().unsqueeze(2).expand_as(self.b_BTD)
        tables = self.b_BTD.new_zeros(len(self.b_BTD), self.num_rows, self.b_BTD.shape[-1])
        return tables.scatter_add(1, index, self.b_BTD)

    def total(self, scale: RowScale) -> Tensor:
        # The padding index −1 is no row.
        return torch.ops.aten.embedding_dense_backward(
            scale.of(self.b_BTD), self.rows_read(), self.num_rows, -1, False
        )

    def norms(self, part: slice) -> tuple[Tensor, Tensor]:
        """‖g‖² = Σ_{t,u: k_t = k_u} b_t·b_u, without a table per record."""
        squares, reach, depth, _ = self.squares(part)
        return safe_squares(squares, reach, depth, self.b_BTD.shape[1]), reach

    def squares(self, part: slice) -> tuple[Tensor, Tensor, int, Tensor]:
        """‖g‖² as computed, the reach, the depth of rounding, and ‖b_t‖ from above.

        Only positions that read the same row meet: the reach is (Σ_{t,u: k_t = k_u} ‖b_t‖‖b_u‖)^½.
        """
        index_BT, b_BTD = piece(self.rows_read(), part), piece(self.b_BTD, part)
        same = index_BT.unsqueeze(2) == index_BT.unsqueeze(1)
        inner = inner_products(b_BTD, b_BTD)
        positions, width = b_BTD.shape[1:]
        length = lengths(inner, width)
        together = length.unsqueeze(2) * length.unsqueeze(1)
        reach = sum_over_pairs(together * same).sqrt()
        # A product and not `where`: a value that is not finite must reach the norm.
        vanished = torch.finfo(inner.dtype).tiny * width * positions**2
        squares = sum_over_pairs(inner * same) + vanished
        return squares, reach, dot_depth(width) + sum_depth(positions, positions), length


@dataclass(frozen=True)
class Tied:
    """A matrix with uses of both forms, such as an embedding that is also the output head.

    With G = Σ_t b_t a_tᵀ + Σ_s e(k_s) g_sᵀ,

      ‖G‖² = ‖Σ_t b_t a_tᵀ‖² + ‖Σ_s e(k_s) g_sᵀ‖² + 2·Σ_{t,s} b_t[k_s]·(a_t·g_s),

    where the cross term needs a gather of b at the tokens and no (P, D) array.

    Rounding, in the terms above: the cross term's a_t·g_s is off by at most n·u·‖a_t‖‖g_s‖ and
    D·τ, and |b_t[k_s]| ≤ ‖b_t‖. With S_d = Σ_t ‖a_t‖‖b_t‖ and S_l = Σ_s ‖g_s‖ the cross term, which
    counts twice, is off by 2·n·u·S_d·S_l; the first two are off by n·u·S_d² and n·u·S_l². Together
    that is n·u·S² with the joint reach S = S_d + S_l.
    """

    dense: Dense
    table: Lookup

    def rows(self) -> Tensor:
        return self.dense.rows() + self.table.rows()

    def total(self, scale: RowScale) -> Tensor:
        return self.dense.total(scale) + self.table.total(scale)

    def norms(self, part: slice) -> tuple[Tensor, Tensor]:
        a_BTD, b_BTP = piece(self.dense.a_BTD, part), piece(self.dense.b_BTP, part)
        index_BS, g_BSD = piece(self.table.rows_read(), part), piece(self.table.b_BTD, part)
        (positions, width), reads = a_BTD.shape[1:], g_BSD.shape[1]
        dense_squares, dense_reach = self.dense.norms(part)
        table_squares, _, table_depth, g_lengths = self.table.squares(part)
        at_tokens = b_BTP.gather(2, index_BS.unsqueeze(1).expand(-1, positions, -1))
        cross = sum_over_pairs(at_tokens * inner_products(a_BTD, g_BSD))
        tiny = torch.finfo(cross.dtype).tiny
        vanished = tiny * (width * at_tokens.abs().sum(dim=2).sum(dim=1) + positions * reads)
        reach = dense_reach + g_lengths.sum(dim=1)
        depth = max(table_depth, dot_depth(width) + sum_depth(positions, reads)) + 3
        squares = dense_squares + table_squares + 2 * (cross + vanished)
        return safe_squares(squares, reach, depth, positions + reads + 1), reach


def matrix_gradients(uses: Sequence[Dense | Lookup]) -> RecordGradients:
    """The gradient of one (P, D) matrix from all its uses, as rows or norms, whichever is cheaper.

    matrix_gradients([Lookup(vocabulary, tokens_BT, b_BTD), Dense(hidden_BTD, logits_b_BTP)])
    """
    dense = [use for use in uses if isinstance(use, Dense)]
    tables = [use for use in uses if isinstance(use, Lookup)]
    columns = [u.a_BTD for u in dense], [u.b_BTP for u in dense], [u.b_BTD for u in tables]
    factors = wide_together(*(_cat(column) for column in columns if column))
    coarse = int(bool(dense) and uses_tf32("matmul", factors[0]))
    form: Dense | Lookup | Tied
    if not tables:
        form, num_rows = Dense(*factors), factors[1].shape[-1]
        if factors[0].shape[1] == 1:  # ‖b aᵀ‖ = ‖a‖·‖b‖
            norms = sum_of_squares(factors[0]) * sum_of_squares(factors[1])
            return Contracted(norms, None, form.total, form.rows, coarse)
    else:
        num_rows = tables[0].num_rows
        table = Lookup(num_rows, _cat([u.tokens_BT for u in tables]), factors[-1])
        form = Tied(Dense(*factors[:2]), table) if dense else table
    if rows_are_kept(num_rows * factors[0].shape[-1], *factors):
        return Stacked(form.rows())
    positions = sum(x.shape[1] for x in factors[1:] or factors)
    norms, reach = in_pieces(len(factors[0]), 4 * positions**2, form.norms)
    return Contracted(norms, reach, form.total, form.rows, coarse)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=1)
