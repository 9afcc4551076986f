"""The first layers of a network: an enforced bound on the input, centring and scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tacit.lipschitz.bounds import Bound, Parameterless, own_axes


class BoundedInput(nn.Module):
    """Scales each record to norm at most X: x·min(1, X/‖x‖), or onto the sphere: X·x/‖x‖.

    It enforces the bound on the input that the layers after it rely on. On the sphere all records
    have norm X, which wastes none of the noise that X costs. A record that is not finite becomes 0,
    and 0 stays 0. Clipping is a projection on a convex set, so it is 1-Lipschitz; x/‖x‖ has no
    Lipschitz constant near 0, which training does not need (no parameter comes before it) and
    certificates account for (see `tacit.certificates`).
    """

    exact = True

    def __init__(self, max_norm: float = 1.0, *, sphere: bool = False) -> None:
        super().__init__()
        if not 0 < max_norm < float("inf"):
            raise ValueError(f"max_norm is {max_norm}; give a finite number above 0")
        self.max_norm, self.sphere = float(max_norm), sphere

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        seen = flat.detach()
        # Squares of large numbers overflow: divide by the largest entry first. It is NaN or ∞ where
        # any entry is, so one pass finds both.
        largest = seen.abs().amax(dim=1, keepdim=True) if flat.shape[1] else seen.sum(1, True)
        finite = largest.isfinite()
        flat = torch.where(finite, flat, 0.0)
        safe = torch.where(finite, largest, 0.0).clamp_min(torch.finfo(flat.dtype).tiny)
        unit = flat / safe
        norms = torch.linalg.vector_norm(unit, dim=1, keepdim=True, dtype=torch.float64) * safe
        # 0 stays 0, and has a gradient of 0: 0 · ∞ is NaN, in the backward pass too.
        norms = torch.where(norms > 0, norms, 1.0)
        # A few roundings lower, so that the norm of the output keeps to the bound.
        reach = self.max_norm * (1 - 4 * torch.finfo(flat.dtype).eps)
        scale = reach / norms
        if not self.sphere:
            scale = scale.clamp(max=1.0)
        return (unit * (scale * safe).to(flat.dtype)).reshape(x.shape)

    def extra_repr(self) -> str:
        return f"{self.max_norm}{', sphere' if self.sphere else ''}"

    def output_norm(self, x: Bound) -> float:
        return self.max_norm if self.sphere else min(x.norm, self.max_norm)

    def lipschitz(self, x: Bound) -> float:
        return float("inf") if self.sphere else 1.0

    def gradient_norms(self, x: Bound, cotangent: float) -> dict[str, float]:
        return {}


class LayerCentering(nn.Module, Parameterless):
    """x − mean(x) over some of a record's own axes, all of them by default.

    I − 11ᵀ/n is symmetric and its own square: an orthogonal projection, of norm 1  [clipless
    paper, Prop. 4]. Centring over the batch axis is refused: one record would move the gradients of
    all others.
    """

    def __init__(self, axes: int | Sequence[int] | None = None) -> None:
        super().__init__()
        chosen = (axes,) if isinstance(axes, int) else axes
        self.axes = None if chosen is None else tuple(chosen)
        if self.axes is not None and 0 in self.axes:
            own_axes(self.axes, 2, "LayerCentering")  # refuses in words

    def forward(self, x: Tensor) -> Tensor:
        chosen = range(1, x.dim()) if self.axes is None else self.axes
        axes = own_axes(chosen, x.dim(), "LayerCentering")
        return x - x.mean(dim=axes, keepdim=True) if axes else x

    def extra_repr(self) -> str:
        return "all axes" if self.axes is None else f"{self.axes}"


class Scale(nn.Module, Parameterless):
    """y = factor·x. Lipschitz |factor|, output |factor|·X."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        if not math.isfinite(factor) or factor == 0:
            raise ValueError(f"factor is {factor}; give a finite number other than 0")
        self.factor = float(factor)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor}"

    def lipschitz(self, x: Bound) -> float:
        return abs(self.factor)
