"""Linear layers with a bounded weight, and biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, Layer, finite_above_zero, own_axis
from tacit.lipschitz.projection import Constraint
from tacit.lipschitz.sets import SLACK, FrobeniusBall, Orthogonal, WeightSet


class ConstrainedWeight(nn.Module):
    """The answers of y = Wx + c with ‖W‖ ≤ max_norm as an operator and ‖c‖ ≤ max_bias.

    P positions share the bias, X is the norm of the whole record, and √reads is how much longer
    than the record all windows that the weight is applied to can be together:
      output      max_norm·X + √P·‖c‖
      Lipschitz   max_norm
      weight      √reads·X·G
      bias        ‖Σ_p g_p‖ ≤ Σ_p ‖g_p‖ ≤ √P·G           (the same bias P times; Cauchy–Schwarz)
    A bias costs noise on P positions' worth of sensitivity, so layers have none by default.
    """

    objects = ("within",)
    weight: Any
    bias: Any
    within: Any
    reads: Callable[[Bound], int]  # how often the record's most-read number is read
    positions: Callable[[Bound], int]  # how many positions share the bias

    def _limit(self, max_norm: float, max_bias: float) -> None:
        """Set the limits. A negative one would make a bound smaller than what it bounds."""
        kind = type(self).__name__
        self.max_norm = finite_above_zero(f"{kind}: max_norm", max_norm)
        if not 0 <= max_bias < math.inf:
            raise ValueError(f"{kind}: max_bias is {max_bias}; give a finite number of at least 0")
        self.max_bias = float(max_bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {type(self.within).__name__}({self.max_norm:g})"

    def constraints(self) -> list[Constraint]:
        constraints = [Constraint(self.weight, self.within)]
        if self.bias is not None:
            constraints.append(Constraint(self.bias, FrobeniusBall(self.max_bias)))
        return constraints

    def output_norm(self, x: Bound) -> float:
        if self.bias is None:
            return self.lipschitz(x) * x.norm
        # One number for all outputs would be read once per output and position.
        if self.bias.shape != self.weight.shape[:1]:
            raise Refused(
                f"its bias has shape {tuple(self.bias.shape)}; its bounds are for one number per "
                f"output, of which it has {len(self.weight)}"
            )
        bias = self.max_bias * (1 + SLACK)
        return self.lipschitz(x) * x.norm + math.sqrt(self.positions(x)) * bias

    def lipschitz(self, x: Bound) -> float:
        limit: float = self.within.max_norm
        return limit * (1 + SLACK)

    def gradient_norms(self, x: Bound, cotangent: float) -> dict[str, float]:
        norms = {"weight": math.sqrt(self.reads(x)) * x.norm * cotangent}
        if self.bias is not None:
            norms["bias"] = math.sqrt(self.positions(x)) * cotangent
        return norms


class SpectralLinear(ConstrainedWeight, nn.Linear):
    """y = Wx + c on the last axis, with ‖W‖₂ ≤ max_norm and ‖c‖ ≤ max_bias.

    T rows (tokens, patches) x_t of one record, X the norm of all of them together:
      output      (Σ_t ‖Wx_t + c‖²)^(1/2) ≤ ‖W‖·X + √T·‖c‖
      Lipschitz   ‖W‖
      weight      ‖Σ_t g_t x_tᵀ‖_F ≤ Σ_t ‖g_t‖‖x_t‖ ≤ G·X          (Cauchy–Schwarz)
      bias        ‖Σ_t g_t‖ ≤ √T·G                                 (the same bias T times)
    `within` chooses another set than orthogonal matrices, such as `SpectralBall`.

        nn.Sequential(BoundedInput(1.0), SpectralLinear(64, 32), MaxMin(), SpectralLinear(32, 10))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        max_norm: float = 1.0,
        max_bias: float = 1.0,
        within: type[WeightSet] = Orthogonal,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._limit(max_norm, max_bias)
        self.within = within(self.max_norm)  # type: ignore[call-arg]
        if self.weight.is_meta:
            return  # `torch.nn.utils.skip_init` fills the weights later
        nn.init.orthogonal_(self.weight, gain=self.max_norm)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def reads(self, x: Bound) -> int:
        return 1

    def positions(self, x: Bound) -> int:
        return x.tokens


class FrobeniusLinear(SpectralLinear):
    """y = Wx + c on the last axis, with ‖W‖_F ≤ max_norm and ‖c‖ ≤ max_bias.

    ‖W‖₂ ≤ ‖W‖_F, so all of `SpectralLinear`'s bounds hold. The certificate is one sum of squares,
    and for one output the two norms are the same: the layer for a single logit. For many outputs
    the ball is much smaller, since all singular values share one budget.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        max_norm: float = 1.0,
        max_bias: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        limits: dict[str, Any] = {"max_norm": max_norm, "max_bias": max_bias}
        how: dict[str, Any] = {"within": FrobeniusBall, "device": device, "dtype": dtype}
        super().__init__(in_features, out_features, bias, **limits, **how)
        with torch.no_grad():
            # Orthogonal so far: min(m, n) singular values of max_norm.
            self.weight /= math.sqrt(min(in_features, out_features))


class AddBias(Layer):
    """y_cp = x_cp + b_c at each of P positions p, ‖b‖ ≤ max_bias.

      output      ‖x + b⊗1‖ ≤ X + √P·‖b‖
      Lipschitz   1
      bias        ‖Σ_p g_p‖ ≤ Σ_p ‖g_p‖ ≤ √P·G: the same bias P times  (Cauchy–Schwarz)

    √P, not 1: on 28×28 positions the gradient is up to 28 times the cotangent. Features are axis
    1; for tokens (B, T, C) give `axis=-1`.
    """

    shown = "features max_bias axis"

    def __init__(self, features: int, max_bias: float = 1.0, axis: int = 1) -> None:
        super().__init__()
        self.max_bias = finite_above_zero("max_bias", max_bias)
        self.features, self.axis = int(features), int(axis)
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        axis = own_axis(self.axis, x.dim(), "AddBias")
        # Broadcasting would make one bias out of many features, or many features out of one.
        if not x.shape[axis] == self.features == self.bias.numel():
            raise Refused(
                f"AddBias was built for {self.features} features; axis {axis} has "
                f"{x.shape[axis]}, and the bias {self.bias.numel()}"
            )
        return x + self.bias.view((-1,) + (1,) * (x.dim() - 1 - axis))

    def constraints(self) -> list[Constraint]:
        return [Constraint(self.bias, FrobeniusBall(self.max_bias))]

    def output_norm(self, x: Bound) -> float:
        return x.norm + self._root_positions(x) * self.max_bias * (1 + SLACK)

    def gradient_norms(self, x: Bound, cotangent: float) -> dict[str, float]:
        return {"bias": self._root_positions(x) * cotangent}

    def _root_positions(self, x: Bound) -> float:
        return math.sqrt(math.prod(x.shape) / self.features)
