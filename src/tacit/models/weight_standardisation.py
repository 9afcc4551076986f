"""Convolutions whose filters are standardised before use."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tacit.models.normalisation import Norm, group_norm


class WeightStandardisedConv2d(nn.Conv2d):
    """Convolves with Ŵ_o = (W_o − mean W_o) / √(n·var W_o + ε), n numbers in each filter o.

    [Qiao 2019], scaled by n as in [Brock 2021] so that outputs are no larger than inputs. Ŵ is
    made of weights alone, so records stay apart. There is no gain a filter: the normalisation
    that follows has one.
    """

    eps = 1e-5

    def standardised(self) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        size = self.weight[0].numel()
        return (self.weight - mean) * (size * variance + self.eps).rsqrt()

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.standardised(), self.bias)


@dataclass(frozen=True)
class WeightStandardised:
    """A choice for `make_trainable`: this norm, and standardised convolutions before it."""

    norm: Norm = field(default_factory=group_norm)
