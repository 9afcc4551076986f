"""A bias on its own."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tacit.lipschitz.axes import own_axis
from tacit.lipschitz.bounds import Bound
from tacit.lipschitz.projection import Constraint
from tacit.lipschitz.refused import Refused
from tacit.lipschitz.sets import SLACK, FrobeniusBall


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
