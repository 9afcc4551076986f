"""Linear modules without negative weights: averages, copies, interpolation.

For A ≥ 0 and any p > 0, ‖A‖₂² = λ_max(AᵀA) ≤ max_i (AᵀAp)_i/p_i  [Collatz 1942, Wielandt 1950]:
with D = diag(p), D⁻¹AᵀAD has the same eigenvalues, and none is larger than the largest row sum.
p = 1 gives at most Schur's row sums times column sums; p ← AᵀAp is power iteration, and this is the
one side from which it bounds the norm *above*. AᵀAp is one forward and one backward pass of the
module itself, whatever its padding, divisors and rounding of sizes.

Windows of k numbers, a number in at most M of them: row sums 1 and column sums M/k, so at most
√(M/k): 1/√k where they do not overlap, near 1 at stride 1. Copies (padding, nearest-neighbour
upsampling): AᵀA counts the copies of each number, and the root of the largest count is exact.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tacit.lipschitz.bounds import Bound, Parameterless
from tacit.lipschitz.refused import Refused

_ROUNDING = 2.0**-40


class NonNegativeLinear(Parameterless):
    def __init__(self, module: nn.Module, passes: int = 16) -> None:
        self.module, self.passes = module, passes

    def lipschitz(self, x: Bound) -> float:
        p = torch.ones(1, *x.shape, dtype=torch.float64)
        least = math.inf
        for _ in range(self.passes):
            p = p.detach().requires_grad_(True)
            with torch.enable_grad():
                half_square = self.module.forward(p).square().sum() / 2
                (image,) = torch.autograd.grad(half_square, p)
            least = min(least, float((image / p.detach()).max()))
            # Any p above 0 will do, and a number that no window reads must not become 0.
            p = (image / image.max()).clamp_min(1e-6)
        return math.sqrt(least) * (1 + _ROUNDING)


def average_pool(module: nn.Module) -> NonNegativeLinear:
    divisor = getattr(module, "divisor_override", None)
    if divisor is not None and divisor <= 0:
        raise Refused(f"divides by {divisor}; give a divisor_override above 0, or none")
    return NonNegativeLinear(module)


def circular_pad(module: nn.Module) -> NonNegativeLinear:
    """Copies; with a negative amount, PyTorch may return memory that it never wrote."""
    padding: Any = module.padding
    if any(amount < 0 for amount in padding):
        raise Refused(
            f"pads by {tuple(padding)}, and PyTorch leaves memory unwritten where circular padding "
            "is negative; give amounts from 0, and cut with nn.ConstantPad1d and its like"
        )
    return NonNegativeLinear(module)


# The other modes have negative weights.
_AVERAGING = ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "area")


def upsample(module: nn.Upsample) -> NonNegativeLinear:
    if module.mode not in _AVERAGING:
        raise Refused(f"mode {module.mode!r} overshoots; use one of {', '.join(_AVERAGING)}")
    return NonNegativeLinear(module)
