"""The sets that constrained weights are kept in.

A set is a frozen value, so weights of one set and one shape are treated as one batch. It has
  norm_upper(stack)   an *upper* bound of the norm that the set limits, one number per weight;
  project(stack)      weights near the given ones, roughly in the set (then scaled to be certain);
  spread              how many times its Frobenius norm a weight's limited norm can be.
None of them waits for the device.

The two sets of convolution kernels make the flattened kernel orthogonal (RKO, [Li 2019]) and limit
the norm of the convolution. They differ in their bound on that norm, and so in how large the kernel
may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tacit.lipschitz.operator_norm import (
    DENSITY,
    Axis,
    convolution_norm_upper,
    most_reads,
    operator_norm_upper,
    orthogonalise,
    reshaped_norm_upper,
    rough_norm_upper,
)

# A weight whose certified norm is within this of its limit stays as it is, bit for bit, so that
# projecting twice changes nothing; every bound allows for it.
SLACK = 2.0**-12


class WeightSet(Protocol):
    """A set of weights; `tacit.lipschitz.sets` says what each member returns."""

    @property
    def max_norm(self) -> float: ...

    @property
    def spread(self) -> float: ...

    def norm_upper(self, stack: Tensor) -> Tensor: ...

    def project(self, stack: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class SpectralBall:
    """‖W‖₂ ≤ max_norm, for each of `groups` row blocks of the weight flattened to (rows, rest).

    The nearest point of the ball would shrink only the singular values above the limit; dividing
    by the norm shrinks all, costs one norm, and is what [Miyato 2018] does with a norm from below.
    """

    max_norm: float
    groups: int = 1

    spread: ClassVar[float] = 1.0  # ‖W‖₂ ≤ ‖W‖_F

    def norm_upper(self, stack: Tensor) -> Tensor:
        return operator_norm_upper(as_matrices(stack, self.groups)).amax(dim=1)

    def project(self, stack: Tensor) -> Tensor:
        return shrunk(stack, self.norm_upper(stack), self.max_norm)


@dataclass(frozen=True)
class Orthogonal(SpectralBall):
    """W/max_norm with all singular values near 1 and none above it: gradient norm preserving.

    The weight is flattened to (rows, rest) in `groups` row blocks. Certified like the
    ball, where the near-orthogonal bound is exact to six digits.
    """

    steps: int = 6

    def project(self, stack: Tensor) -> Tensor:
        matrices = as_matrices(stack, self.groups)
        norms = rough_norm_upper(matrices)
        inside = matrices / norms.clamp_min(1e-30).to(matrices.dtype)[..., None, None]
        return (orthogonalise(inside, self.steps) * self.max_norm).reshape(stack.shape)


@dataclass(frozen=True)
class FrobeniusBall:
    """The root of the sum of squares is at most max_norm: biases, and weights where it suffices."""

    max_norm: float

    spread: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not self.max_norm >= 0:
            raise ValueError(f"FrobeniusBall: max_norm is {self.max_norm}; give a number from 0")

    def norm_upper(self, stack: Tensor) -> Tensor:
        return stack.detach().to(torch.float64).flatten(1).norm(dim=1) * (1 + 2.0**-40)

    def project(self, stack: Tensor) -> Tensor:
        return shrunk(stack, self.norm_upper(stack), self.max_norm)


def as_matrices(stack: Tensor, groups: int) -> Tensor:
    """(L, rows, …) as (L, groups, rows/groups, rest)."""
    return stack.reshape(len(stack), groups, stack.shape[1] // groups, -1)


def shrunk(stack: Tensor, norms_L: Tensor, max_norm: float) -> Tensor:
    """Each weight that is above the limit and its slack, brought to the limit."""
    inside = norms_L <= max_norm * (1 + SLACK)
    factor_L = torch.where(inside, 1.0, max_norm / norms_L.clamp_min(1e-300))
    shape = (len(stack),) + (1,) * (stack.dim() - 1)
    return stack * factor_L.to(stack.dtype).view(shape)


@dataclass(frozen=True)
class ReshapedKernel:
    """‖conv‖ ≤ √reads·‖K_flat‖ ≤ max_norm: orthogonal once flattened, over the root of the reads.

    It costs as much as a linear layer's projection, and loses a factor 1.3 to 2 where windows
    overlap. Exact where they do not.
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
class TrueConvolution(ReshapedKernel):
    """‖conv‖ ≤ max_norm with the convolution's own norm: a flat-orthogonal kernel, divided by it.

    For the same noise, kernels are 1.3 (stride 2) to 2 times (5×5) those of `ReshapedKernel`; no
    larger where windows are disjoint, or channels so few that both norms agree. It costs a Gram
    iteration at each frequency of the torus, or at fewer angles on large images: `density`.
    """

    density: float = DENSITY

    def norm_upper(self, stack: Tensor) -> Tensor:
        return self._norms(stack).amax(dim=1)

    def project(self, stack: Tensor) -> Tensor:
        flat = Orthogonal(self.max_norm, self.groups, self.steps).project(stack)
        # The mean of K̂K̂* over frequencies is K_flat·K_flatᵀ, so the convolution's norm is at least
        # the flat kernel's, and certifying the weight divides by it. Only groups need their own.
        if self.groups == 1:
            return flat
        scale = self.max_norm / self._norms(flat).clamp_min(1e-30)
        kernels = in_groups(flat, self.groups)
        shape = scale.shape + (1,) * (kernels.dim() - 2)
        return (kernels * scale.to(kernels.dtype).view(shape)).reshape(stack.shape)

    def _norms(self, stack: Tensor) -> Tensor:
        return convolution_norm_upper(in_groups(stack, self.groups), self.axes, self.density)


def in_groups(stack: Tensor, groups: int) -> Tensor:
    """(L, out, in/groups, k…) as (L, groups, out/groups, in/groups, k…)."""
    return stack.unflatten(1, (groups, stack.shape[1] // groups))
