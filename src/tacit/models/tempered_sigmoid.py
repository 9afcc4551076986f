"""Tempered sigmoids: bounded activations with three settings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tacit.losses.shapes import positive


class TemperedSigmoid(nn.Module):
    """φ(x) = s·σ(T·x) − o, within [−o, s − o].  [Papernot 2021]

    s = 2, T = 2, o = 1 is tanh. A smaller s·T makes activations, and so gradients, smaller.
    """

    def __init__(
        self, scale: float = 2.0, inverse_temperature: float = 2.0, offset: float = 1.0
    ) -> None:
        super().__init__()
        positive("scale", scale)
        positive("inverse_temperature", inverse_temperature)
        self.scale = scale
        self.inverse_temperature = inverse_temperature
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.inverse_temperature * x) - self.offset

    def extra_repr(self) -> str:
        return f"{self.scale}, {self.inverse_temperature}, {self.offset}"
