"""Per-record gradients of a matrix that enters a program by products or by look-ups.

A use of a (P, D) matrix has one of two factored forms, with T positions for each record:

  Dense    Σ_t b_t a_tᵀ, where y_t = W a_t and b_t is the cotangent of y_t;
  Lookup   Σ_t e(k_t) b_tᵀ, where y_t = W[k_t] and e(k) is the unit vector of row k.

One matrix may be used several times: at every step of a recurrence, or as an embedding and again
as the output head. The record's gradient is the sum of all its uses, and so its norm is that of
the sum: uses of one form are concatenated along T, and the two forms meet in a cross term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.engines.gradients import (
    Contracted,
    RecordGradients,
    Scale,
    Stacked,
    by_pieces,
    piece,
    pieces,
    small_stack,
)
from tacit.engines.norms import (
    dot_depth,
    ghost_norms,
    inner_products,
    lengths,
    safe_squares,
    sum_depth,
    sum_of_squares,
    sum_over_pairs,
)
from tacit.engines.precision import cuts_products, wide, wide_together


@dataclass(frozen=True)
class Dense:
    """Σ_t b_t a_tᵀ of each record."""

    a_BTD: Tensor
    b_BTP: Tensor

    def rows(self) -> Tensor:
        return self.b_BTP.transpose(1, 2) @ self.a_BTD

    def total(self, scale: Scale) -> Tensor:
        b, a = scale.of(self.b_BTP), scale.present(self.a_BTD)
        return b.flatten(0, 1).T @ a.flatten(0, 1)


@dataclass(frozen=True)
class Lookup:
    """Σ_t e(k_t) b_tᵀ of each record, of a table with `num_rows` rows.

    Tokens may count from the end (−1 is the last row), as in `table[tokens]`. Where an embedding
    has a `padding_idx`, the caller sets b to zero at the positions that read it.
    """

    num_rows: int
    tokens_BT: Tensor
    b_BTD: Tensor

    def rows_read(self) -> Tensor:
        """Tokens from 0 to num_rows − 1: two names of one row must compare equal."""
        tokens = self.tokens_BT.long()
        return torch.where(tokens < 0, tokens + self.num_rows, tokens)

    def rows(self) -> Tensor:
        tables = self.b_BTD.new_zeros(len(self.b_BTD), self.num_rows, self.b_BTD.shape[-1])
        return tables.scatter_add(
            1, self.rows_read().unsqueeze(2).expand_as(self.b_BTD), self.b_BTD
        )

    def total(self, scale: Scale) -> Tensor:
        # The gradient of an embedding without padding: −1 is no row.
        return torch.ops.aten.embedding_dense_backward(
            scale.of(self.b_BTD), self.rows_read(), self.num_rows, -1, False
        )


def outer_products(a_BTD: Tensor, b_BTP: Tensor) -> RecordGradients:
    """Σ_t b_t a_tᵀ of each record, as rows or by the ghost norm, whichever is cheaper."""
    a_BTD, b_BTP = wide_together(a_BTD, b_BTP)
    use = Dense(a_BTD, b_BTP)
    batch, positions, width_in = a_BTD.shape
    width_out = b_BTP.shape[-1]
    coarse = int(cuts_products(a_BTD))
    if positions == 1:
        # ‖b aᵀ‖ = ‖a‖·‖b‖.
        norms = sum_of_squares(a_BTD) * sum_of_squares(b_BTP)
        return Contracted(norms, None, use.total, use.rows, coarse)
    # Rows that are not much larger than what they come from are kept: no second contraction.
    few = width_in * width_out <= 2 * positions * (width_in + width_out)
    if few or small_stack(batch, width_in * width_out, a_BTD.device):
        return Stacked(use.rows())

    def norms_of(part: slice) -> tuple[Tensor, Tensor]:
        return ghost_norms(piece(a_BTD, part), piece(b_BTP, part))

    norms, reach = by_pieces(pieces(batch, 3 * positions**2), norms_of)
    return Contracted(norms, reach, use.total, use.rows, coarse)


def table_gradients(num_rows: int, tokens_BT: Tensor, b_BTP: Tensor) -> RecordGradients:
    """Row v of the table gets the b_t of every t that read v: shape (num_rows, P).

    ‖g‖² = Σ_{t,u: k_t = k_u} b_t·b_u: no table per record is made for the norm, unless it is small.
    """
    use = Lookup(num_rows, tokens_BT, wide(b_BTP))
    b_BTP = use.b_BTD
    batch, positions, _ = b_BTP.shape
    if num_rows <= 2 * positions or small_stack(batch, num_rows * b_BTP.shape[-1], b_BTP.device):
        return Stacked(use.rows())
    index_BT = use.rows_read()

    def norms_of(part: slice) -> tuple[Tensor, Tensor]:
        squares, reach, depth, _ = _table_squares(piece(index_BT, part), piece(b_BTP, part))
        return safe_squares(squares, reach, depth, positions), reach

    norms, reach = by_pieces(pieces(batch, 4 * positions**2), norms_of)
    return Contracted(norms, reach, use.total, use.rows)


def joined_products(uses: Sequence[Dense | Lookup]) -> RecordGradients:
    """The gradient of one (P, D) matrix that is used several times, and the norm of the sum.

    Uses of one form are concatenated along T. With both forms, G = Σ_t b_t a_tᵀ + Σ_s e(k_s) g_sᵀ,

      ‖G‖² = ‖Σ_t b_t a_tᵀ‖² + ‖Σ_s e(k_s) g_sᵀ‖² + 2·Σ_{t,s} b_t[k_s]·(a_t·g_s),

    where the cross term needs a gather of b at the tokens and no (P, D) array.

    Rounding, in the terms of `norms`: the cross term's a_t·g_s is off by at most n·u·‖a_t‖‖g_s‖ and
    D·τ, and |b_t[k_s]| ≤ ‖b_t‖. With S_d = Σ_t ‖a_t‖‖b_t‖ and S_l = Σ_s ‖g_s‖ the cross term, which
    counts twice, is off by 2·n·u·S_d·S_l; the first two are off by n·u·S_d² and n·u·S_l². Together
    that is n·u·S² with the joint reach S = S_d + S_l.

    Example: a tied embedding and output head of a language model,

        joined_products([Lookup(vocabulary, tokens_BT, b_BTD), Dense(hidden_BTD, logits_b_BTP)])
    """
    dense = [use for use in uses if isinstance(use, Dense)]
    lookups = [use for use in uses if isinstance(use, Lookup)]
    a_BTD = _cat([use.a_BTD for use in dense])
    b_BTP = _cat([use.b_BTP for use in dense])
    tokens_BS = _cat([use.tokens_BT for use in lookups])
    g_BSD = _cat([use.b_BTD for use in lookups])
    if a_BTD is None or b_BTP is None:
        assert tokens_BS is not None
        assert g_BSD is not None
        return table_gradients(lookups[0].num_rows, tokens_BS, g_BSD)
    if tokens_BS is None or g_BSD is None:
        return outer_products(a_BTD, b_BTP)
    a_BTD, b_BTP, g_BSD = wide_together(a_BTD, b_BTP, g_BSD)
    product, table = Dense(a_BTD, b_BTP), Lookup(b_BTP.shape[-1], tokens_BS, g_BSD)

    def make_rows() -> Tensor:
        return product.rows() + table.rows()

    def contract(scale: Scale) -> Tensor:
        return product.total(scale) + table.total(scale)

    (batch, positions, width), reads = a_BTD.shape, tokens_BS.shape[1]
    num_rows = b_BTP.shape[-1]
    few = num_rows * width <= 2 * (positions * (width + num_rows) + reads * width)
    if few or small_stack(batch, num_rows * width, a_BTD.device):
        return Stacked(make_rows())
    index_BS = table.rows_read()

    def norms_of(part: slice) -> tuple[Tensor, Tensor]:
        return _joint_norms(*(piece(x, part) for x in (a_BTD, b_BTP, index_BS, g_BSD)))

    workspace = 3 * positions**2 + 4 * reads**2 + 3 * positions * reads
    norms, reach = by_pieces(pieces(batch, workspace), norms_of)
    return Contracted(norms, reach, contract, make_rows, int(cuts_products(a_BTD)))


def _joint_norms(
    a_BTD: Tensor, b_BTP: Tensor, index_BS: Tensor, g_BSD: Tensor
) -> tuple[Tensor, Tensor]:
    """‖G‖² from above and S = S_d + S_l; see `joined_products`."""
    positions, reads, width = a_BTD.shape[1], g_BSD.shape[1], a_BTD.shape[2]
    # Already from above, and ‖Σ_t b_t a_tᵀ‖² is one of three terms that are added.
    dense_squares, dense_reach = ghost_norms(a_BTD, b_BTP)
    table_squares, _, table_depth, g_lengths = _table_squares(index_BS, g_BSD)
    at_tokens = b_BTP.gather(2, index_BS.unsqueeze(1).expand(-1, positions, -1))
    cross = sum_over_pairs(at_tokens * inner_products(a_BTD, g_BSD))
    tiny = torch.finfo(cross.dtype).tiny
    vanished = tiny * (width * at_tokens.abs().sum(dim=2).sum(dim=1) + positions * reads)
    reach = dense_reach + g_lengths.sum(dim=1)
    depth = max(table_depth, dot_depth(width) + sum_depth(positions, reads)) + 3
    squares = dense_squares + table_squares + 2 * (cross + vanished)
    return safe_squares(squares, reach, depth, positions + reads + 1), reach


def _table_squares(index_BT: Tensor, b_BTD: Tensor) -> tuple[Tensor, Tensor, int, Tensor]:
    """Σ_{t,u: k_t = k_u} b_t·b_u, its reach, its depth of rounding, and ‖b_t‖ from above.

    Only positions that read the same row meet: the reach is (Σ_{t,u: k_t = k_u} ‖b_t‖‖b_u‖)^½.
    """
    same = index_BT.unsqueeze(2) == index_BT.unsqueeze(1)
    inner = inner_products(b_BTD, b_BTD)
    positions, width = b_BTD.shape[1:]
    length = lengths(inner, width)
    together = length.unsqueeze(2) * length.unsqueeze(1)
    reach = sum_over_pairs(together * same).sqrt()
    # A product and no `where`: what is not finite must reach the norm, whoever it meets.
    vanished = torch.finfo(inner.dtype).tiny * width * positions**2
    squares = sum_over_pairs(inner * same) + vanished
    return squares, reach, dot_depth(width) + sum_depth(positions), length


def _cat(tensors: Sequence[Tensor]) -> Tensor | None:
    if len(tensors) < 2:
        return tensors[0] if tensors else None
    return torch.cat(list(tensors), dim=1)
