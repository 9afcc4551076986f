"""Modules side by side on one input."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tacit.lipschitz.axes import own_axis
from tacit.lipschitz.bounds import Bound, Pullback, Walk
from tacit.lipschitz.cotangents import clips_cotangents
from tacit.lipschitz.refused import Refused


class Sum(nn.Module):
    """y = Σ_b f_b(x): ‖y‖ ≤ Σ_b F_b; each branch gets the cotangent G; the input Σ_b B_b(G)."""

    def __init__(self, branches: Iterable[nn.Module]) -> None:
        super().__init__()
        self.branches = _some(branches, self)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [branch(x) for branch in self.branches]
        _require_one_shape([y.shape for y in outputs])
        return functools.reduce(torch.add, outputs)

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        outputs, backs = _through(len(self.branches), x, walk)
        _require_one_shape([y.shape for y in outputs])
        norm = math.fsum(y.norm for y in outputs)

        def pull(cotangent: float) -> float:
            return math.fsum(back(cotangent) for back in backs)

        return Bound(norm, outputs[0].shape), pull


class Concatenate(nn.Module):
    """y = (f_1(x), f_2(x), …) along one axis, the channels' by default.

      output   ‖y‖² = Σ_b ‖f_b(x)‖² ≤ Σ_b F_b²
      branch   the cotangent splits as it is laid out, Σ_b ‖g_b‖² ≤ G², so each gets at most G
      input    Σ_b B_b(‖g_b‖) = Σ_b L_b‖g_b‖ ≤ (Σ_b L_b²)^(1/2)·G = (Σ_b B_b(G)²)^(1/2)

    The last line takes B_b to be linear. A branch that clips cotangents at C ≪ G can send back
    all of B_b(G) for a small share of G, every such branch at once; then Σ_b B_b(G).
    """

    def __init__(self, branches: Iterable[nn.Module], axis: int = 1) -> None:
        super().__init__()
        self.axis = int(axis)
        self.branches = _some(branches, self)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [branch(x) for branch in self.branches]
        return torch.cat(outputs, dim=own_axis(self.axis, outputs[0].dim(), "Concatenate"))

    def extra_repr(self) -> str:
        return f"axis={self.axis}"

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        outputs, backs = _through(len(self.branches), x, walk)
        shape = concatenated([y.shape for y in outputs], self.axis)
        shared_out = clips_cotangents(self.branches)

        def pull(cotangent: float) -> float:
            parts = [back(cotangent) for back in backs]
            return math.fsum(parts) if shared_out else math.hypot(*parts)

        return Bound(math.hypot(*(y.norm for y in outputs)), shape), pull


def concatenated(shapes: list[tuple[int, ...]], axis: int) -> tuple[int, ...]:
    """The shape of one record's tensors laid end to end along `axis`, the batch being axis 0."""
    own = own_axis(axis, len(shapes[0]) + 1, "concatenation") - 1
    around = {(*shape[:own], *shape[own + 1 :]) for shape in shapes}
    if len(around) != 1 or len({len(shape) for shape in shapes}) != 1:
        raise Refused(f"shapes {shapes} cannot be laid end to end along axis {own + 1}")
    total = sum(shape[own] for shape in shapes)
    return (*shapes[0][:own], total, *shapes[0][own + 1 :])


def _some(branches: Iterable[nn.Module], layer: nn.Module) -> nn.ModuleList:
    found = nn.ModuleList(branches)
    if not len(found):
        raise ValueError(f"{type(layer).__name__} of no branches; give it at least one module")
    return found


def _through(count: int, x: Bound, walk: Walk) -> tuple[list[Bound], list[Pullback]]:
    walked = [walk(f"branches.{i}", x) for i in range(count)]
    return [y for y, _ in walked], [back for _, back in walked]


def _require_one_shape(shapes: list[tuple[int, ...]]) -> None:
    if len(set(map(tuple, shapes))) != 1:
        raise Refused(f"Sum of branches of shapes {shapes}; they must agree")
