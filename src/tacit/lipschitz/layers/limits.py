"""Layers that limit norms: of a record at the input, of its cotangent; centring and scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tacit.lipschitz.bounds import Bound, Layer, finite_above_zero, own_axes, per_axis


class BoundedInput(Layer):
    """Scales each record to norm at most X: x·min(1, X/‖x‖), or onto the sphere: X·x/‖x‖.

    It enforces the bound on the input that the layers after it rely on. On the sphere all records
    have norm X, which wastes none of the noise that X costs. A record that is not finite becomes 0,
    and 0 stays 0. Clipping is a projection on a convex set, so it is 1-Lipschitz; x/‖x‖ has no
    Lipschitz constant near 0, which training does not need (no parameter comes before it) and
    certificates account for (see `tacit.certificates`).
    """

    exact = True
    shown = "max_norm sphere"

    def __init__(self, max_norm: float = 1.0, *, sphere: bool = False) -> None:
        super().__init__()
        self.max_norm, self.sphere = finite_above_zero("max_norm", max_norm), sphere

    def forward(self, x: Tensor) -> Tensor:
        unit, sizes, norms = scaled_rows(x)
        # 0 stays 0, and has a gradient of 0: 0 · ∞ is NaN, in the backward pass too.
        norms = torch.where(norms > 0, norms, 1.0)
        # A few roundings lower, so that the norm of the output keeps to the bound.
        scale = self.max_norm * (1 - 4 * torch.finfo(x.dtype).eps) / norms
        if not self.sphere:
            scale = scale.clamp(max=1.0)
        return (unit * (scale * sizes).to(x.dtype)).reshape(x.shape)

    def output_norm(self, x: Bound) -> float:
        return self.max_norm if self.sphere else min(x.norm, self.max_norm)

    def lipschitz(self, x: Bound) -> float:
        return math.inf if self.sphere else 1.0


def scaled_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows divided by their largest entry, that entry, and the rows' norms as columns of float64.

    Squares of large numbers overflow, so the largest entry is divided out first. It is NaN or ∞
    where any entry is: one pass finds both, and such a row becomes 0.
    """
    flat = x.flatten(1)
    seen = flat.detach()
    largest = seen.abs().amax(dim=1, keepdim=True) if flat.shape[1] else seen.sum(1, True)
    finite = largest.isfinite()
    sizes = torch.where(finite, largest, 0.0).clamp_min(torch.finfo(flat.dtype).tiny)
    unit = torch.where(finite, flat, 0.0) / sizes
    norms = torch.linalg.vector_norm(unit, dim=1, keepdim=True, dtype=torch.float64) * sizes
    return unit, sizes, norms


class LayerCentering(Layer):
    """x − mean(x) over some of a record's own axes, all of them by default.

    I − 11ᵀ/n is symmetric and its own square: an orthogonal projection, of norm 1  [clipless
    paper, Prop. 4]. Centring over the batch axis is refused: one record would move the gradients of
    all others.
    """

    shown = "axes"

    def __init__(self, axes: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.axes = None if axes is None else per_axis(axes, 1)
        if self.axes is not None and 0 in self.axes:
            own_axes(self.axes, 2, "LayerCentering")  # refuses in words

    def forward(self, x: Tensor) -> Tensor:
        chosen = range(1, x.dim()) if self.axes is None else self.axes
        axes = own_axes(chosen, x.dim(), "LayerCentering")
        return x - x.mean(dim=axes, keepdim=True) if axes else x


class Scale(Layer):
    """y = factor·x. Lipschitz |factor|, output |factor|·X."""

    shown = "factor"

    def __init__(self, factor: float) -> None:
        super().__init__()
        if not math.isfinite(factor) or factor == 0:
            raise ValueError(f"factor is {factor}; give a finite number other than 0")
        self.factor = float(factor)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def lipschitz(self, x: Bound) -> float:
        return abs(self.factor)


class ClipGradient(Layer):
    """f(x) = x forwards; backwards each record's cotangent g becomes g·min(1, C/‖g‖).

    The layers before it get cotangents of norm at most C, whatever the layers after it and the
    loss are  [clipless paper, §3.3]. It clips each record by itself only if the loss is summed
    over records, as `Clipless` does.
    """

    exact = True
    shown = "max_norm"

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.max_norm = finite_above_zero("max_norm", max_norm)

    @property
    def cotangent_limit(self) -> float:
        return self.max_norm

    def forward(self, x: Tensor) -> Tensor:
        clipped: Tensor = _Clip.apply(x, self.max_norm)
        return clipped


class _Clip(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, max_norm: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.max_norm = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        limited, _, _ = limit_rows(gradients[0], ctx.max_norm)
        return limited, None


def limit_rows(rows: Tensor, max_norm: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row scaled to norm at most C: g·min(1, C/‖g‖); the norms before, and which are finite.

    A row that is not finite becomes zero. C is first lowered by a few roundings, so that the
    computed row keeps to the bound. Half precision is scaled in float32 and rounded at the end.
    """
    flat = rows.flatten(1)
    finite = flat.isfinite().all(dim=1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    flat = torch.where(finite[:, None], flat, 0).to(wide)
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    reach = max_norm * (1 - 16 * torch.finfo(wide).eps - torch.finfo(rows.dtype).eps)
    scale = (reach / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp(max=1.0)
    limited = (flat * scale[:, None].to(wide)).to(rows.dtype).reshape(rows.shape)
    return limited, norms, finite
