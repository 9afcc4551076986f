"""A network of a user's own, in a module that can be imported."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OwnNetwork(nn.Module):
    def __init__(self, width: int = 5, classes: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class Tied(nn.Module):
    """The same weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
