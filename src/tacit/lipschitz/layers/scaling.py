"""Multiplication by a number that is fixed."""

from __future__ import annotations

import math

from torch import Tensor, nn

from tacit.lipschitz.bounds import Bound, Parameterless


class Scale(nn.Module, Parameterless):
    """y = factor·x. Lipschitz |factor|, output |factor|·X."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        if not math.isfinite(factor) or factor == 0:
            raise ValueError(f"factor is {factor}; give a finite number other than 0")
        self.factor = float(factor)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor}"

    def lipschitz(self, x: Bound) -> float:
        return abs(self.factor)
