"""Linear layers with a bounded weight, and biases.

Linear layers with a bounded weight.

A linear layer whose weight is bounded in the Frobenius norm.

A bias on its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, own_axis, require_limits
from tacit.lipschitz.projection import Constraint
from tacit.lipschitz.sets import SLACK, FrobeniusBall, Orthogonal, WeightSet


class SpectralLinear(nn.Linear):
    """y = Wx + c on the last axis, with ‖W‖₂ ≤ max_norm and ‖c‖ ≤ max_bias.

    T rows (tokens, patches) x_t of one record, X the norm of all of them together:
      output      (Σ_t ‖Wx_t + c‖²)^(1/2) ≤ ‖W‖·X + √T·‖c‖
      Lipschitz   ‖W‖
      weight      ‖Σ_t g_t x_tᵀ‖_F ≤ Σ_t ‖g_t‖‖x_t‖ ≤ G·X          (Cauchy–Schwarz)
      bias        ‖Σ_t g_t‖ ≤ √T·G                                 (the same bias T times)
    A bias costs noise on T positions' worth of sensitivity, so there is none unless asked for.
    `within` chooses another set than orthogonal matrices, such as `SpectralBall`.
    """

    objects = ("within",)

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
        require_limits(self, max_norm, max_bias)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.max_norm, self.max_bias = float(max_norm), float(max_bias)
        self.within = within(self.max_norm)  # type: ignore[call-arg]
        if self.weight.is_meta:
            return  # whoever gives it memory gives it weights
        nn.init.orthogonal_(self.weight, gain=self.max_norm)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def constraints(self) -> list[Constraint]:
        found = [Constraint(self.weight, self.within)]
        if self.bias is not None:
            found.append(Constraint(self.bias, FrobeniusBall(self.max_bias)))
        return found

    def output_norm(self, x: Bound) -> float:
        bias = 0.0 if self.bias is None else self.max_bias * (1 + SLACK)
        return self.lipschitz(x) * x.norm + math.sqrt(x.tokens) * bias

    def lipschitz(self, x: Bound) -> float:
        return self.within.max_norm * (1 + SLACK)

    def gradient_norms(self, x: Bound, cotangent: float) -> Mapping[str, float]:
        found = {"weight": x.norm * cotangent}
        if self.bias is not None:
            found["bias"] = math.sqrt(x.tokens) * cotangent
        return found


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
        super().__init__(
            in_features,
            out_features,
            bias,
            max_norm=max_norm,
            max_bias=max_bias,
            within=FrobeniusBall,
            device=device,
            dtype=dtype,
        )
        with torch.no_grad():
            # Orthogonal so far: min(m, n) singular values of max_norm.
            self.weight /= math.sqrt(min(in_features, out_features))


class AddBias(nn.Module):
    """y_cp = x_cp + b_c at each of P positions p, ‖b‖ ≤ max_bias.

      output      ‖x + b⊗1‖ ≤ X + √P·‖b‖
      Lipschitz   1
      bias        ‖Σ_p g_p‖ ≤ Σ_p ‖g_p‖ ≤ √P·G: the same bias P times  (Cauchy–Schwarz)

    √P, not 1: on 28×28 positions the gradient is up to 28 times the cotangent. Features are axis
    1; for tokens (B, T, C) say `axis=-1`.
    """

    def __init__(self, features: int, max_bias: float = 1.0, axis: int = 1) -> None:
        super().__init__()
        if not 0 < max_bias < math.inf:
            raise ValueError(f"max_bias is {max_bias}; give a finite number above 0")
        self.max_bias, self.axis = float(max_bias), int(axis)
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        axis = own_axis(self.axis, x.dim(), "AddBias")
        # Broadcasting would make one bias out of many features, or many features out of one.
        if x.shape[axis] != len(self.bias):
            raise Refused(
                f"AddBias was built for {len(self.bias)} features and axis {axis} has "
                f"{x.shape[axis]}"
            )
        return x + self.bias.view((-1,) + (1,) * (x.dim() - 1 - axis))

    def extra_repr(self) -> str:
        return f"{len(self.bias)}, max_bias={self.max_bias}, axis={self.axis}"

    def constraints(self) -> list[Constraint]:
        return [Constraint(self.bias, FrobeniusBall(self.max_bias))]

    def output_norm(self, x: Bound) -> float:
        return x.norm + self._root_positions(x) * self.max_bias * (1 + SLACK)

    def lipschitz(self, x: Bound) -> float:
        return 1.0

    def gradient_norms(self, x: Bound, cotangent: float) -> Mapping[str, float]:
        return {"bias": self._root_positions(x) * cotangent}

    def _root_positions(self, x: Bound) -> float:
        return math.sqrt(math.prod(x.shape) / len(self.bias))
