"""A batch's gradients of one parameter, record by record, in the form that is cheapest to keep.

Three promises every form keeps, B = records:
  squares()   an *upper* bound of ‖g_i‖² of each record, for the numbers that `total` really adds;
  total(s)    Σ_i s_i·g_i over the records with s_i ≠ 0: one that is not finite is left out so;
  rows()      all g_i, stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tacit.queries.engines.scaling import present


class RecordGradients(Protocol):
    def squares(self) -> Tensor: ...

    def total(self, scale_B: Tensor) -> Tensor: ...

    def rows(self) -> Tensor: ...


@dataclass
class Stacked:
    """All rows, kept: nothing is computed twice, and the norm is of the very numbers added.

    They may lie in memory with their dimensions in another order, and are read as they lie.
    """

    rows_BP: Tensor
    squares_B: Tensor | None = None

    def squares(self) -> Tensor:
        if self.squares_B is not None:
            return self.squares_B
        return self._as_they_lie().reshape(len(self.rows_BP), -1).square().sum(dim=1)

    def total(self, scale_B: Tensor) -> Tensor:
        lying = self._as_they_lie()
        flat = lying.reshape(len(lying), -1)
        total = scale_B.to(flat.dtype) @ present(flat, scale_B)
        order = self._order()
        back = [order.index(dim) for dim in range(len(order))]
        return total.reshape(lying.shape[1:]).permute(back)

    def rows(self) -> Tensor:
        return self.rows_BP

    def _order(self) -> list[int]:
        """A row's dimensions, from the one of largest stride to that of least."""
        strides = self.rows_BP.stride()[1:]
        return sorted(range(len(strides)), key=lambda dim: -strides[dim])

    def _as_they_lie(self) -> Tensor:
        return self.rows_BP.permute(0, *(1 + dim for dim in self._order()))


@dataclass
class Contracted:
    """Only norms, kept; the total comes from one contraction of inputs and output gradients.

    A record's share of that contraction is not the vector whose norm was taken: both were
    rounded. With S = Σ_t ‖a_t‖·‖b_t‖ over its positions t, the rounding of the squared norm is at
    most γ·S² and that of the share at most τ·S, so ‖share‖ ≤ √(norm² + γ·S²) + τ·S, which is what
    `squares` gives. TensorFloat-32 cuts each factor of a product to 10 bits, so there τ = 2·2⁻¹⁰,
    once for the share and once more (`roundings`) where the norm is of rows made the same way.
    """

    norm_squares_B: Tensor
    reach_B: Tensor
    contract: Callable[[Tensor], Tensor]
    make_rows: Callable[[], Tensor]
    coarse: bool = False
    roundings: int = 1

    def squares(self) -> Tensor:
        rounding = torch.finfo(self.norm_squares_B.dtype).eps
        gamma = 8 * rounding
        tau = self.roundings * (2.0**-9 if self.coarse else 8 * rounding)
        norms, reach = self.norm_squares_B.clamp_min(0), self.reach_B
        upper = torch.addcmul(norms, reach, reach, value=gamma).sqrt()
        return torch.add(upper, reach, alpha=tau).square()

    def total(self, scale_B: Tensor) -> Tensor:
        return self.contract(scale_B)

    def rows(self) -> Tensor:
        return self.make_rows()


def pieces(count: int, numbers_each: int, limit: int = 1 << 27) -> list[slice]:
    """Slices of `count` records that hold at most `limit` numbers of workspace together."""
    size = max(1, limit // max(1, numbers_each))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
