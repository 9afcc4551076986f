"""Small models, one for each way in which parameters can be used. Two classes, float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.lipschitz import (
    BoundedInput,
    LayerCentering,
    MaxMin,
    ScaledL2NormPool2d,
    SpectralConv2d,
    SpectralLinear,
)

VOCABULARY = 6


class TiedWeights(nn.Module):
    """Two layers with a bias each, and one weight between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class UsedTwice(nn.Module):
    """One layer object, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class TokenModel(nn.Module):
    """Integer inputs; one token may occur several times in a record."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(dim=1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2))


def dropout_off() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).eval()


def partly_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def lipschitz_mlp() -> nn.Module:
    return nn.Sequential(
        BoundedInput(1.0, sphere=True), SpectralLinear(4, 6), MaxMin(), SpectralLinear(6, 2)
    )


def lipschitz_cnn() -> nn.Module:
    return nn.Sequential(
        LayerCentering(),
        BoundedInput(2.0),
        SpectralConv2d(1, 4, 3, padding=1, bias=True),
        MaxMin(),
        ScaledL2NormPool2d(3),
        nn.Flatten(),
        SpectralLinear(16, 2),
    )


class LipschitzUsedTwice(nn.Module):
    """One layer object, called twice, with a skip: walked by its trace."""

    def __init__(self) -> None:
        super().__init__()
        self.front = BoundedInput(1.0)
        self.layer = SpectralLinear(4, 4)
        self.head = SpectralLinear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))) + x)


def row(n: int) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64)


def image(n: int) -> Tensor:
    return torch.randn(n, 1, 6, 6, dtype=torch.float64)


def tokens(n: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (n, 5))


@dataclass(frozen=True)
class ModelCase:
    """A model and the records it takes. `draw(n)` gives n random inputs."""

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[int], Tensor] = row

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().double()

    @property
    def lipschitz(self) -> bool:
        return self.name.startswith("lipschitz")

    @property
    def continuous(self) -> bool:
        return self.draw is not tokens


ALL_MODELS = [
    ModelCase("mlp", mlp),
    ModelCase("cnn-group-norm", cnn, image),
    ModelCase("embedding", TokenModel, tokens),
    ModelCase("tied-weights", TiedWeights),
    ModelCase("layer-norm", layer_norm),
    ModelCase("dropout-off", dropout_off),
    ModelCase("layer-used-twice", UsedTwice),
    ModelCase("partly-frozen", partly_frozen),
    ModelCase("lipschitz-mlp", lipschitz_mlp),
    ModelCase("lipschitz-cnn", lipschitz_cnn, image),
    ModelCase("lipschitz-used-twice", LipschitzUsedTwice),
]
