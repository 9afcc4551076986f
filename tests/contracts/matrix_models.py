"""Models for the contract matrix: one for each kind of layer, with a few hundred parameters.

A sum that is rounded to low precision jumps in one of some 32 coordinates when a record joins
thousands of others, so a model of ten parameters would rarely show it.
"""

from __future__ import annotations

import torch
from contract_models import ModelCase
from torch import Tensor, nn

from tacit.lipschitz import (
    BoundedInput,
    LayerCentering,
    MaxMin,
    ScaledL2NormPool2d,
    SpectralConv2d,
    SpectralLinear,
)

TOKENS = 16


def signs(n: int) -> Tensor:
    return 1.0 - 2.0 * torch.randint(0, 2, (n, 128)).double()


def rows(n: int) -> Tensor:
    return torch.randn(n, 8, dtype=torch.float64)


def images(n: int) -> Tensor:
    return torch.randn(n, 1, 6, 6, dtype=torch.float64)


def sentences(n: int) -> Tensor:
    return torch.randint(0, TOKENS, (n, 4))


def zeroed(layer: nn.Module) -> nn.Module:
    nn.init.zeros_(layer.weight)
    return layer


def ties() -> nn.Module:
    """With inputs of ±1 all 256 gradient entries are ±1, and clipped they are ±C/16: the same power
    of two, so the entries of a sum are ties of bfloat16 all at once."""
    return zeroed(nn.Linear(128, 2, bias=False))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(64, 2),
    )


def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


class Embedded(nn.Module):
    """Tokens to vectors to a mean, with a layer between; subclasses say which."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.between = between
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(x)).mean(dim=1))

    def middle(self, x: Tensor) -> Tensor:
        return self.between(x)


class Attention(Embedded):
    def __init__(self) -> None:
        super().__init__(nn.MultiheadAttention(8, 2, batch_first=True))

    def middle(self, x: Tensor) -> Tensor:
        return x + self.between(x, x, x, need_weights=False)[0]


class Recurrent(Embedded):
    def __init__(self) -> None:
        super().__init__(nn.GRU(8, 8, batch_first=True))

    def middle(self, x: Tensor) -> Tensor:
        return self.between(x)[0]


def embedding() -> nn.Module:
    return Embedded(nn.Tanh())


class OwnParameters(nn.Module):
    """A module of the user's own, for which no gradient rule exists."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 16))
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix) * self.scale


def own_parameters() -> nn.Module:
    return nn.Sequential(OwnParameters(), nn.Linear(16, 2))


class TiedWeights(nn.Module):
    """One weight in two layers with a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def lipschitz_ties() -> nn.Module:
    """Inputs of ±1 have a norm below 12: they are not scaled."""
    return nn.Sequential(BoundedInput(12.0), zeroed(SpectralLinear(128, 2)))


def lipschitz_mlp() -> nn.Module:
    return nn.Sequential(
        BoundedInput(1.0, sphere=True),
        SpectralLinear(8, 16, bias=True),
        MaxMin(),
        SpectralLinear(16, 2, bias=True),
    )


def lipschitz_cnn() -> nn.Module:
    return nn.Sequential(
        LayerCentering(),
        BoundedInput(2.0),
        SpectralConv2d(1, 16, 3, padding=1, bias=True),
        MaxMin(),
        ScaledL2NormPool2d(3),
        nn.Flatten(),
        SpectralLinear(64, 2),
    )


class LipschitzUsedTwice(nn.Module):
    """One layer object, called twice, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.front = BoundedInput(1.0)
        self.layer = SpectralLinear(8, 8)
        self.head = SpectralLinear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))) + x)


MATRIX_MODELS = [
    ModelCase("ties", ties, signs),
    ModelCase("mlp", mlp, rows),
    ModelCase("cnn-group-norm", cnn, images),
    ModelCase("layer-norm", layer_norm, rows),
    ModelCase("batch-norm", batch_norm, rows),
    ModelCase("embedding", embedding, sentences),
    ModelCase("attention", Attention, sentences),
    ModelCase("recurrent", Recurrent, sentences),
    ModelCase("own-parameters", own_parameters, rows),
    ModelCase("tied-weights", TiedWeights, rows),
    ModelCase("lipschitz-ties", lipschitz_ties, signs),
    ModelCase("lipschitz-mlp", lipschitz_mlp, rows),
    ModelCase("lipschitz-cnn", lipschitz_cnn, images),
    ModelCase("lipschitz-used-twice", LipschitzUsedTwice, rows),
]
