"""The Householder activation: MaxMin with a mirror of its own for each pair of channels."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tacit.lipschitz.axes import own_axis
from tacit.lipschitz.bounds import Bound
from tacit.lipschitz.refused import Refused


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
