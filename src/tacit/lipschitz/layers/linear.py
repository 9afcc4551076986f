"""Linear layers with a bounded weight."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from tacit.lipschitz.bounds import Bound
from tacit.lipschitz.limits import require_limits
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
