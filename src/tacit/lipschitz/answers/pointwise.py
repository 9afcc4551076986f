"""Functions of one number at a time.

With |f(x)| ≤ offset + gain·|x|, |f(x)| ≤ ceiling and |f'(x)| ≤ slope, on n numbers of norm X:
  output      ‖f(x)‖ ≤ min(offset·√n + gain·X, ceiling·√n)      (triangle inequality)
  Lipschitz   the Jacobian is diagonal: slope

A function that is not 0 at 0 turns a zero record into one of norm |f(0)|·√n, whatever X is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tacit.lipschitz.bounds import Bound
from tacit.lipschitz.refused import Refused

# The rounding of float32 next to 1: a jump below this is no more than a network rounds by.
NEGLIGIBLE = 2.0**-24


@dataclass(frozen=True)
class Pointwise:
    slope: float = 1.0
    gain: float = 1.0
    offset: float = 0.0
    ceiling: float = math.inf
    exact: bool = False
    jump: float = 0.0  # the most that f changes by at one point; 0 where it is continuous

    @property
    def non_expansive(self) -> bool:
        """‖f(x)‖ ≤ ‖x‖ and 1-Lipschitz."""
        return self.slope <= 1 and self.gain <= 1 and self.offset == 0

    def output_norm(self, x: Bound) -> float:
        root = math.sqrt(math.prod(x.shape))
        return min(self.offset * root + self.gain * x.norm, self.ceiling * root)

    def lipschitz(self, x: Bound) -> float:
        return self.slope

    def gradient_norms(self, x: Bound, cotangent: float) -> Mapping[str, float]:
        return {}


# Slopes that have no short form, rounded up in the seventh digit.
# GELU = xΦ(x): f' = Φ + xφ, f'' = φ·(2 − x²), so the largest slope is Φ(√2) + √2·φ(√2) and the
# smallest 1 minus that.
GELU_SLOPE = 1.1289042
# With tanh(√(2/π)(x + 0.044715x³)) in place of Φ's formula: f'' = 0 at x = 1.418504.
GELU_TANH_SLOPE = 1.1289931
# SiLU = xσ(x): f'' = 0 where t·tanh t = 1, t = x/2 = 1.199679, and there f' = (1 + t)/2.
SILU_SLOPE = 1.0998394
# Mish = x·tanh(log(1 + eˣ)): f'' = 0 at x = 1.490571.
MISH_SLOPE = 1.0884982
# SELU = λx above 0 and λα(eˣ − 1) below: λα, just below 0.
SELU_SLOPE = 1.7580994


def _leaky_relu(m: nn.LeakyReLU) -> Pointwise:
    """x above 0, a·x below."""
    slope = max(1.0, abs(m.negative_slope))
    return Pointwise(slope, slope, exact=slope == 1)


def _elu(m: nn.ELU) -> Pointwise:
    """α(eˣ − 1) below 0, of slope |α|eˣ."""
    slope = max(1.0, abs(m.alpha))
    return Pointwise(slope, slope)


def _celu(m: nn.CELU) -> Pointwise:
    """α(e^(x/α) − 1) below 0, of slope e^(x/α) ≤ 1 for α > 0."""
    if not m.alpha > 0:
        raise Refused(f"CELU(alpha={m.alpha}) is unbounded in slope; give an alpha above 0")
    return Pointwise()


def _gelu(m: nn.GELU) -> Pointwise:
    """x·Φ(x), so |f(x)| ≤ |x|: steeper than 1 and yet no longer than its input."""
    return Pointwise(GELU_TANH_SLOPE if m.approximate == "tanh" else GELU_SLOPE)


def _softplus(m: nn.Softplus) -> Pointwise:
    """log(1 + e^(βx))/β, of slope σ(βx) < 1 and (log 2)/β at 0.

    Above βx = t, the threshold, PyTorch returns x, which is in (0, f(x)) for a t above 0. There it
    falls by (log(1 + eᵗ) − t)/β = log(1 + e⁻ᵗ)/β, at once: no gradient shows it, and a certificate
    has to. 2·10⁻⁹ for t = 20 and β = 1.
    """
    if not (m.beta > 0 and m.threshold >= 0):
        raise Refused(
            f"Softplus(beta={m.beta}, threshold={m.threshold}); give a beta above 0 and a "
            "threshold of at least 0"
        )
    jump = math.log1p(math.exp(-m.threshold)) / m.beta
    return Pointwise(offset=math.log(2) / m.beta, jump=jump)


def _hardtanh(m: nn.Hardtanh) -> Pointwise:
    """x cut to [low, high]: |f(x)| ≤ |f(0)| + |x|."""
    low, high = m.min_val, m.max_val
    at_zero = abs(min(max(0.0, low), high))
    return Pointwise(offset=at_zero, ceiling=max(abs(low), abs(high)), exact=at_zero == 0)


ACTIVATIONS: dict[type[nn.Module], Callable[[Any], Pointwise]] = {
    nn.ReLU: lambda m: Pointwise(exact=True),
    nn.ReLU6: lambda m: Pointwise(ceiling=6.0, exact=True),
    nn.LeakyReLU: _leaky_relu,
    nn.ELU: _elu,
    nn.CELU: _celu,
    nn.SELU: lambda m: Pointwise(SELU_SLOPE, SELU_SLOPE),
    nn.GELU: _gelu,
    # x·σ(x), x·tanh(…) and x·(0 to 1): no longer than x.
    nn.SiLU: lambda m: Pointwise(SILU_SLOPE),
    nn.Mish: lambda m: Pointwise(MISH_SLOPE),
    # x(x + 3)/6 between −3 and 3: slope (2x + 3)/6, up to 3/2 at 3.
    nn.Hardswish: lambda m: Pointwise(slope=1.5),
    nn.Softplus: _softplus,
    # −log(1 + e⁻ˣ): slope σ(−x), −log 2 at 0.
    nn.LogSigmoid: lambda m: Pointwise(offset=math.log(2)),
    # σ' = σ(1 − σ) ≤ 1/4, and ½ at 0.
    nn.Sigmoid: lambda m: Pointwise(0.25, 0.25, offset=0.5, ceiling=1.0),
    # PyTorch's sixth is one of single precision, above 1/6.
    nn.Hardsigmoid: lambda m: Pointwise(0.1666667, 0.1666667, offset=0.5, ceiling=1.0),
    nn.Tanh: lambda m: Pointwise(ceiling=1.0),
    nn.Hardtanh: _hardtanh,
    # x/(1 + |x|): slope 1/(1 + |x|)².
    nn.Softsign: lambda m: Pointwise(ceiling=1.0),
    # x − tanh x: slope tanh² x.
    nn.Tanhshrink: lambda m: Pointwise(),
    # x moved towards 0 by λ, and 0 within it.
    nn.Softshrink: lambda m: Pointwise(exact=True),
}
