"""The sets that convolution kernels are kept in: `sets.py` for the operator instead of the matrix.

Both make the flattened kernel orthogonal (RKO, [Li 2019]) and limit the norm of the convolution.
They differ in what they know about that norm, and so in how large the kernel may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from tacit.lipschitz.convolution_axis import Axis
from tacit.lipschitz.convolution_norm import (
    DENSITY,
    convolution_norm_upper,
    most_reads,
    reshaped_norm_upper,
)
from tacit.lipschitz.sets import Orthogonal


@dataclass(frozen=True)
class ReshapedKernel:
    """‖conv‖ ≤ √reads·‖K_flat‖ ≤ max_norm: orthogonal once flattened, over the root of the reads.

    Costs as much as a linear layer's projection, and loses a factor 1.3 to 2 where windows overlap.
    Exact where they do not.
    """

    max_norm: float
    axes: tuple[Axis, ...]
    groups: int = 1
    steps: int = 6

    @property
    def spread(self) -> float:
        return math.sqrt(most_reads(self.axes))  # ‖conv‖ ≤ √reads·‖K_flat‖₂ ≤ √reads·‖K‖_F

    def norm_upper(self, stack: Tensor) -> Tensor:
        return reshaped_norm_upper(in_groups(stack, self.groups), self.axes).amax(dim=1)

    def project(self, stack: Tensor) -> Tensor:
        limit = self.max_norm / math.sqrt(most_reads(self.axes))
        return Orthogonal(limit, self.groups, self.steps).project(stack)


@dataclass(frozen=True)
class TrueConvolution:
    """‖conv‖ ≤ max_norm with the convolution's own norm: a flat-orthogonal kernel, divided by it.

    For the same noise, kernels are 1.3 (stride 2) to 2 times (5×5) those of `ReshapedKernel`; no
    larger where windows are disjoint, or channels so few that both norms agree. Costs a Gram
    iteration at each frequency of the torus, or at fewer angles on large images: `density`.
    """

    max_norm: float
    axes: tuple[Axis, ...]
    groups: int = 1
    steps: int = 6
    density: float = DENSITY

    @property
    def spread(self) -> float:
        return math.sqrt(most_reads(self.axes))  # ‖conv‖ ≤ √reads·‖K_flat‖₂ ≤ √reads·‖K‖_F

    def norm_upper(self, stack: Tensor) -> Tensor:
        return self._norms(stack).amax(dim=1)

    def project(self, stack: Tensor) -> Tensor:
        found = Orthogonal(self.max_norm, self.groups, self.steps).project(stack)
        # The mean of K̂K̂* over frequencies is K_flat·K_flatᵀ, so the convolution's norm is at least
        # the flat kernel's and whoever certifies this divides by it. Only groups need their own.
        if self.groups == 1:
            return found
        scale = self.max_norm / self._norms(found).clamp_min(1e-30)
        kernels = in_groups(found, self.groups)
        shape = scale.shape + (1,) * (kernels.dim() - 2)
        return (kernels * scale.to(kernels.dtype).view(shape)).reshape(stack.shape)

    def _norms(self, stack: Tensor) -> Tensor:
        return convolution_norm_upper(in_groups(stack, self.groups), self.axes, self.density)


def in_groups(stack: Tensor, groups: int) -> Tensor:
    """(L, out, in/groups, k…) as (L, groups, out/groups, in/groups, k…)."""
    return stack.unflatten(1, (groups, stack.shape[1] // groups))
