"""Activations that keep norms: the absolute value, sorting, and mirrors.

Sorting is 1-Lipschitz. By the rearrangement inequality ⟨sort x, sort y⟩ ≥ ⟨x, y⟩, and
‖sort x‖ = ‖x‖, so ‖sort x − sort y‖² = ‖x‖² + ‖y‖² − 2⟨sort x, sort y⟩ ≤ ‖x − y‖². The Jacobian is
a permutation almost everywhere: gradients keep their norm  [Anil 2019].

Channels are axis 1, as in PyTorch: (B, C), (B, C, H, W). For tokens (B, T, C) give `axis=-1`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, Layer, own_axis


class Absolute(Layer):
    """|x|, entry by entry: 1-Lipschitz, and its Jacobian of ±1 keeps the norm of a gradient.

    max(a, b) = (a + b + |a − b|)/2 makes it MaxMin after a rotation. It needs no even number of
    channels, and costs one pass over the entries each way, as a ReLU does.
    """

    exact = True

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class _Sort(Layer):
    exact = True
    shown = "axis"

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = int(axis)

    def _channels(self, x: Tensor, group: int) -> int:
        kind = type(self).__name__
        axis = own_axis(self.axis, x.dim(), kind)
        if x.shape[axis] % group:
            raise Refused(
                f"{kind} in groups of {group} over {x.shape[axis]} channels (axis {axis}): the "
                "group size must divide the channels; change one of them, or the axis"
            )
        return axis


class MaxMin(_Sort):
    """(a, b) ↦ (max(a, b), min(a, b)) for the two halves a, b of the channels.

    It sorts pairs of a channel and the one half the width further on: two contiguous blocks
    instead of the interleaved ones of `GroupSort(2)`.
    """

    def forward(self, x: Tensor) -> Tensor:
        axis = self._channels(x, 2)
        return torch.cat(order(*x.chunk(2, dim=axis)), dim=axis)


class FullSort(_Sort):
    """Sorts all channels of a position in ascending order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(dim=self._channels(x, 1)).values


class GroupSort(_Sort):
    """Sorts each group of `group_size` neighbouring channels in ascending order."""

    shown = "group_size axis"

    def __init__(self, group_size: int, axis: int = 1) -> None:
        super().__init__(axis)
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}; give at least 1")
        self.group_size = int(group_size)

    def forward(self, x: Tensor) -> Tensor:
        axis = self._channels(x, self.group_size)
        groups = x.unflatten(axis, (-1, self.group_size))
        if self.group_size == 2:
            larger, smaller = order(*groups.unbind(axis + 1))
            ordered = torch.stack((smaller, larger), dim=axis + 1)
        else:
            ordered = groups.sort(dim=axis + 1).values
        return ordered.flatten(axis, axis + 1)


def order(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(max(a, b), min(a, b)), entry by entry."""
    larger, smaller, _ = _Order.apply(a, b)
    return larger, smaller


class _Order(torch.autograd.Function):
    """One mask serves both gradients. PyTorch's own halves them at ties and takes twice as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.maximum(a, b), torch.minimum(a, b), a >= b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(output[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (first,) = ctx.saved_tensors
        of_larger, of_smaller, _ = gradients
        return torch.where(first, of_larger, of_smaller), torch.where(first, of_smaller, of_larger)


class Householder(Layer):
    """MaxMin with a learnt mirror for each pair of channels  [Singla 2021, §5].

    σ(z) = z where vᵀz > 0, and its mirror image (I − 2vvᵀ)z elsewhere. z = (z₁, z₂) is a channel of
    the first half and its partner in the second; v = (sin θ/2, −cos θ/2) with one angle θ per pair,
    so the mirror image is Rz with R = [[cos θ, sin θ], [sin θ, −cos θ]]. θ = π/2, the initial
    value, is MaxMin.

      output      ‖σ(z)‖ = ‖z‖: both branches are orthogonal
      Lipschitz   1: both branches are, and on the mirror vᵀz = 0 they agree
      angles      ∂(Rz)/∂θ = [[−sin θ, cos θ], [cos θ, sin θ]] z is orthogonal too. Pair c, with
                  values z_cp and cotangents g_cp at positions p, has |Σ_p ⟨g_cp, ∂σ⟩| ≤ G_c·X_c;
                  all pairs (Σ_c G_c²X_c²)^(1/2) ≤ G·X, reached when one pair has everything

    Every angle is allowed, so nothing is projected. For tokens give `axis=-1`.
    """

    shown = "channels axis"

    def __init__(self, channels: int, axis: int = 1) -> None:
        super().__init__()
        if channels < 2 or channels % 2:
            raise ValueError(f"channels is {channels}; Householder needs an even number of them")
        self.channels, self.axis = int(channels), int(axis)
        self.angle = nn.Parameter(torch.full((channels // 2,), math.pi / 2))

    def forward(self, x: Tensor) -> Tensor:
        axis = own_axis(self.axis, x.dim(), "Householder")
        if x.shape[axis] != self.channels:
            raise Refused(
                f"Householder was built for {self.channels} channels and axis {axis} has "
                f"{x.shape[axis]}"
            )
        a, b = x.chunk(2, dim=axis)
        angle = self.angle.view((-1,) + (1,) * (x.dim() - 1 - axis))
        above = a * (angle / 2).sin() > b * (angle / 2).cos()
        cos, sin = angle.cos(), angle.sin()
        first = torch.where(above, a, a * cos + b * sin)
        second = torch.where(above, b, a * sin - b * cos)
        return torch.cat((first, second), dim=axis)

    def gradient_norms(self, x: Bound, cotangent: float) -> dict[str, float]:
        return {"angle": x.norm * cotangent}
