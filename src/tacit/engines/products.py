"""Per-record gradients of a matrix that enters a program by products or by look-ups.

A use of a (P, D) matrix has one of two factored forms, with T positions for each record:

  Dense    Σ_t b_t a_tᵀ, where y_t = W a_t and b_t is the cotangent of y_t;
  Lookup   Σ_t e(k_t) b_tᵀ, where y_t = W[k_t] and e(k) is the unit vector of row k.

A matrix may be used several times: at every step of a recurrence, or as an embedding and again as
the output head. A record's gradient is the sum over all uses. Uses of one form are concatenated
along T, and the two forms meet in a cross term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.engines.gradients import (
    Contracted,
    RecordGradients,
    RowScale,
    Stacked,
    in_pieces,
    piece,
    rows_are_kept,
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
from tacit.precision import matmul_uses_tf32, wide_together


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
        return squares, reach, dot_depth(width) + sum_depth(positions), length


@dataclass(frozen=True)
class Tied:
    """A matrix with uses of both forms, such as an embedding that is also the output head.

    With G = Σ_t b_t a_tᵀ + Σ_s e(k_s) g_sᵀ,

      ‖G‖² = ‖Σ_t b_t a_tᵀ‖² + ‖Σ_s e(k_s) g_sᵀ‖² + 2·Σ_{t,s} b_t[k_s]·(a_t·g_s),

    where the cross term needs a gather of b at the tokens and no (P, D) array.

    Rounding, in the terms of `norms`: the cross term's a_t·g_s is off by at most n·u·‖a_t‖‖g_s‖ and
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
    coarse = int(bool(dense) and matmul_uses_tf32(factors[0]))
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
