"""The sets that constrained weights are kept in.

A set is a frozen value, so that weights of one set and one shape can be treated as one batch. It
answers three questions, without asking the device to wait:
  norm_upper(stack)   an *upper* bound of the norm that the set limits, one number a weight;
  project(stack)      weights near the given ones, roughly in the set (then scaled to be certain);
  spread              how many times its Frobenius norm a weight's limited norm can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tacit.lipschitz.operator_norm import operator_norm_upper, rough_norm_upper
from tacit.lipschitz.orthogonalise import orthogonalise

# A weight whose certified norm is within this of its limit is left as it is, bit for bit, so that
# projecting twice changes nothing; every bound allows for it.
SLACK = 2.0**-12


class WeightSet(Protocol):
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

    @property
    def spread(self) -> float:
        return 1.0  # ‖W‖₂ ≤ ‖W‖_F

    def norm_upper(self, stack: Tensor) -> Tensor:
        return self._norms(stack).amax(dim=1)

    def project(self, stack: Tensor) -> Tensor:
        return shrunk(stack, self._norms(stack).amax(dim=1), self.max_norm)

    def _norms(self, stack: Tensor) -> Tensor:
        return operator_norm_upper(as_matrices(stack, self.groups))


@dataclass(frozen=True)
class Orthogonal:
    """W/max_norm with all singular values near 1 and none above it: gradient norm preserving.

    The weight is flattened to (rows, rest) in `groups` row blocks. Certified like the
    ball, where the near-orthogonal bound is exact to six digits.
    """

    max_norm: float
    groups: int = 1
    steps: int = 6

    @property
    def spread(self) -> float:
        return 1.0  # ‖W‖₂ ≤ ‖W‖_F

    def norm_upper(self, stack: Tensor) -> Tensor:
        return operator_norm_upper(as_matrices(stack, self.groups)).amax(dim=1)

    def project(self, stack: Tensor) -> Tensor:
        matrices = as_matrices(stack, self.groups)
        norms = rough_norm_upper(matrices)
        inside = matrices / norms.clamp_min(1e-30).to(matrices.dtype)[..., None, None]
        found = orthogonalise(inside, self.steps) * self.max_norm
        return found.reshape(stack.shape)


@dataclass(frozen=True)
class FrobeniusBall:
    """The root of the sum of squares is at most max_norm: biases, and weights where it suffices."""

    max_norm: float

    def __post_init__(self) -> None:
        if not self.max_norm >= 0:
            raise ValueError(f"FrobeniusBall: max_norm is {self.max_norm}; give a number from 0")

    @property
    def spread(self) -> float:
        return 1.0

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
