"""Models for the contracts: one for each way in which parameters can be used. Two classes, float64.

`ALL_MODELS` are tiny. `MATRIX_MODELS` have a few hundred parameters: a sum that is rounded to low
precision jumps in one of some 32 coordinates when a record joins thousands of others, so a model
of ten parameters would rarely show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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

VOCABULARY, MATRIX_VOCABULARY = 6, 16


# Records -----------------------------------------------------------------------------------------


def rows(n: int, width: int = 4) -> Tensor:
    return torch.randn(n, width, dtype=torch.float64)


def signs(n: int) -> Tensor:
    return 1.0 - 2.0 * torch.randint(0, 2, (n, 128)).double()


def images(n: int) -> Tensor:
    return torch.randn(n, 1, 6, 6, dtype=torch.float64)


def tokens(n: int, vocabulary: int = VOCABULARY, length: int = 5) -> Tensor:
    return torch.randint(0, vocabulary, (n, length))


# Models ------------------------------------------------------------------------------------------


def mlp(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, 2))


def cnn(filters: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, filters, 3, padding=1),
        nn.GroupNorm(2 if filters == 4 else 4, filters),
        nn.ReLU(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(4 * filters, 2),
    )


def layer_norm(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, 2)
    )


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def dropout_off() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).eval()


def partly_frozen() -> nn.Module:
    model = mlp(4, 5)
    model[0].requires_grad_(False)
    return model


def zeroed(layer: nn.Module) -> nn.Module:
    nn.init.zeros_(layer.weight)
    return layer


def ties() -> nn.Module:
    """With inputs of ±1 all 256 gradient entries are ±1, and clipped they are ±C/16: the same power
    of two, so the entries of a sum are ties of bfloat16 all at once."""
    return zeroed(nn.Linear(128, 2, bias=False))


class TiedWeights(nn.Module):
    """Two layers with a bias each, and one weight between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.head = nn.Linear(width, 2)

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


class Embedded(nn.Module):
    """Tokens to vectors to a mean, with a layer between. A token may come twice in a record."""

    def __init__(self, vocabulary: int, width: int, between: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.between = between()
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(x)).mean(dim=1))

    def middle(self, x: Tensor) -> Tensor:
        return self.between(x)


class Attention(Embedded):
    def __init__(self) -> None:
        attention = partial(nn.MultiheadAttention, 8, 2, batch_first=True)
        super().__init__(MATRIX_VOCABULARY, 8, attention)

    def middle(self, x: Tensor) -> Tensor:
        return x + self.between(x, x, x, need_weights=False)[0]


class Recurrent(Embedded):
    def __init__(self) -> None:
        super().__init__(MATRIX_VOCABULARY, 8, partial(nn.GRU, 8, 8, batch_first=True))

    def middle(self, x: Tensor) -> Tensor:
        return self.between(x)[0]


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


def lipschitz_ties() -> nn.Module:
    """Inputs of ±1 have a norm below 12: they are not scaled."""
    return nn.Sequential(BoundedInput(12.0), zeroed(SpectralLinear(128, 2)))


def lipschitz_mlp(width: int, hidden: int, bias: bool = False) -> nn.Module:
    return nn.Sequential(
        BoundedInput(1.0, sphere=True),
        SpectralLinear(width, hidden, bias=bias),
        MaxMin(),
        SpectralLinear(hidden, 2, bias=bias),
    )


def lipschitz_cnn(filters: int) -> nn.Module:
    return nn.Sequential(
        LayerCentering(),
        BoundedInput(2.0),
        SpectralConv2d(1, filters, 3, padding=1, bias=True),
        MaxMin(),
        ScaledL2NormPool2d(3),
        nn.Flatten(),
        SpectralLinear(4 * filters, 2),
    )


class LipschitzUsedTwice(nn.Module):
    """One layer object, called twice, with a skip: walked by its trace."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.front = BoundedInput(1.0)
        self.layer = SpectralLinear(width, width)
        self.head = SpectralLinear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))) + x)


@dataclass(frozen=True)
class ModelCase:
    """A model and the records it takes. `draw(n)` gives n random inputs."""

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[int], Tensor] = rows
    continuous: bool = True

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().double()

    @property
    def lipschitz(self) -> bool:
        return self.name.startswith("lipschitz")


ALL_MODELS = [
    ModelCase("mlp", partial(mlp, 4, 5)),
    ModelCase("cnn-group-norm", partial(cnn, 4), images),
    ModelCase("embedding", partial(Embedded, VOCABULARY, 4, nn.Identity), tokens, continuous=False),
    ModelCase("tied-weights", partial(TiedWeights, 4)),
    ModelCase("layer-norm", partial(layer_norm, 4, 5)),
    ModelCase("dropout-off", dropout_off),
    ModelCase("layer-used-twice", UsedTwice),
    ModelCase("partly-frozen", partly_frozen),
    ModelCase("lipschitz-mlp", partial(lipschitz_mlp, 4, 6)),
    ModelCase("lipschitz-cnn", partial(lipschitz_cnn, 4), images),
    ModelCase("lipschitz-used-twice", partial(LipschitzUsedTwice, 4)),
]
ROWS = partial(rows, width=8)
SENTENCES = partial(tokens, vocabulary=MATRIX_VOCABULARY, length=4)
MATRIX_MODELS = [
    ModelCase("ties", ties, signs),
    ModelCase("mlp", partial(mlp, 8, 16), ROWS),
    ModelCase("cnn-group-norm", partial(cnn, 16), images),
    ModelCase("layer-norm", partial(layer_norm, 8, 16), ROWS),
    ModelCase("batch-norm", batch_norm, ROWS),
    ModelCase("embedding", partial(Embedded, MATRIX_VOCABULARY, 8, nn.Tanh), SENTENCES),
    ModelCase("attention", Attention, SENTENCES),
    ModelCase("recurrent", Recurrent, SENTENCES),
    ModelCase("own-parameters", own_parameters, ROWS),
    ModelCase("tied-weights", partial(TiedWeights, 8), ROWS),
    ModelCase("lipschitz-ties", lipschitz_ties, signs),
    ModelCase("lipschitz-mlp", partial(lipschitz_mlp, 8, 16, bias=True), ROWS),
    ModelCase("lipschitz-cnn", partial(lipschitz_cnn, 16), images),
    ModelCase("lipschitz-used-twice", partial(LipschitzUsedTwice, 8), ROWS),
]
