"""Activations that keep norms.

The absolute value as an activation.

Activations that sort channels: they move numbers about and lose none.

Rearrangement inequality: ⟨sort x, sort y⟩ ≥ ⟨x, y⟩, and ‖sort x‖ = ‖x‖, so
‖sort x − sort y‖² = ‖x‖² + ‖y‖² − 2⟨sort x, sort y⟩ ≤ ‖x − y‖². Hence 1-Lipschitz, and the
Jacobian is a permutation almost everywhere: gradients keep their norm  [Anil 2019].

Channels are axis 1, where PyTorch has them: (B, C), (B, C, H, W). For tokens (B, T, C) say
`axis=-1`.

The Householder activation: MaxMin with a mirror of its own for each pair of channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, Parameterless, own_axis


class Absolute(nn.Module, Parameterless):
    """|x|, number by number: 1-Lipschitz, and its Jacobian of ±1 keeps the norm of a gradient.

    max(a, b) = (a + b + |a − b|)/2 makes it MaxMin after a rotation. It needs no even number of
    channels, and costs one pass over the numbers each way, as a ReLU does.
    """

    exact = True

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class GroupSort(nn.Module, Parameterless):
    """Sorts each group of `group_size` neighbouring channels in ascending order."""

    exact = True

    def __init__(self, group_size: int, axis: int = 1) -> None:
        super().__init__()
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}; give at least 1")
        self.group_size, self.axis = int(group_size), int(axis)

    def forward(self, x: Tensor) -> Tensor:
        axis = _channels(x, self.axis, self.group_size, self)
        groups = x.unflatten(axis, (-1, self.group_size))
        if self.group_size == 2:
            larger, smaller = order(*groups.unbind(axis + 1))
            ordered = torch.stack((smaller, larger), dim=axis + 1)
        else:
            ordered = groups.sort(dim=axis + 1).values
        return ordered.flatten(axis, axis + 1)

    def extra_repr(self) -> str:
        return f"{self.group_size}, axis={self.axis}"


class MaxMin(nn.Module, Parameterless):
    """(a, b) ↦ (max(a, b), min(a, b)) for the two halves a, b of the channels.

    GroupSort of pairs, each of a channel and the one half the width further on: two contiguous
    blocks instead of interleaved ones.
    """

    exact = True

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = int(axis)

    def forward(self, x: Tensor) -> Tensor:
        axis = _channels(x, self.axis, 2, self)
        return torch.cat(order(*x.chunk(2, dim=axis)), dim=axis)

    def extra_repr(self) -> str:
        return f"axis={self.axis}"


class FullSort(nn.Module, Parameterless):
    """Sorts all channels of a position in ascending order."""

    exact = True

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = int(axis)

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(dim=_channels(x, self.axis, 1, self)).values

    def extra_repr(self) -> str:
        return f"axis={self.axis}"


def order(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(max(a, b), min(a, b)), number by number."""
    larger, smaller, _ = _Order.apply(a, b)
    return larger, smaller


class _Order(torch.autograd.Function):
    """Backwards one mask serves both. PyTorch's own halves gradients at ties, at twice the time."""

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


def _channels(x: Tensor, axis: int, group: int, layer: nn.Module) -> int:
    kind = type(layer).__name__
    front = own_axis(axis, x.dim(), kind)
    if x.shape[front] % group:
        raise Refused(
            f"{kind} in groups of {group} over {x.shape[front]} channels (axis {front}): the "
            "group size must divide the channels; change one of them, or the axis"
        )
    return front


class Householder(nn.Module):
    """σ(z) = z where vᵀz > 0, its mirror image (I − 2vvᵀ)z elsewhere  [Singla 2021, §5].

    z = (z₁, z₂) is a channel of the first half and its partner in the second; v = (sin θ/2,
    −cos θ/2), one angle θ a pair, so that the mirror image is Rz with
    R = [[cos θ, sin θ], [sin θ, −cos θ]]. θ = π/2, the start, is MaxMin.

      output      ‖σ(z)‖ = ‖z‖: both branches are orthogonal
      Lipschitz   1: both branches are, and on the mirror vᵀz = 0 they agree
      angles      ∂(Rz)/∂θ = [[−sin θ, cos θ], [cos θ, sin θ]] z is orthogonal too. Pair c, with
                  values z_cp and cotangents g_cp at positions p, has |Σ_p ⟨g_cp, ∂σ⟩| ≤ G_c·X_c;
                  all pairs (Σ_c G_c²X_c²)^(1/2) ≤ G·X, reached when one pair has everything

    Any angle will do, so nothing is projected. Channels are axis 1; for tokens say `axis=-1`.
    """

    def __init__(self, channels: int, axis: int = 1) -> None:
        super().__init__()
        if channels < 2 or channels % 2:
            raise ValueError(f"channels is {channels}; Householder needs an even number of them")
        self.axis = int(axis)
        self.angle = nn.Parameter(torch.full((channels // 2,), math.pi / 2))

    def forward(self, x: Tensor) -> Tensor:
        axis = own_axis(self.axis, x.dim(), "Householder")
        if x.shape[axis] != 2 * len(self.angle):
            raise Refused(
                f"Householder was built for {2 * len(self.angle)} channels and axis {axis} has "
                f"{x.shape[axis]}"
            )
        a, b = x.chunk(2, dim=axis)
        angle = self.angle.view((-1,) + (1,) * (x.dim() - 1 - axis))
        above = a * (angle / 2).sin() > b * (angle / 2).cos()
        cos, sin = angle.cos(), angle.sin()
        first = torch.where(above, a, a * cos + b * sin)
        second = torch.where(above, b, a * sin - b * cos)
        return torch.cat((first, second), dim=axis)

    def extra_repr(self) -> str:
        return f"{2 * len(self.angle)}, axis={self.axis}"

    def output_norm(self, x: Bound) -> float:
        return x.norm

    def lipschitz(self, x: Bound) -> float:
        return 1.0

    def gradient_norms(self, x: Bound, cotangent: float) -> Mapping[str, float]:
        return {"angle": x.norm * cotangent}
