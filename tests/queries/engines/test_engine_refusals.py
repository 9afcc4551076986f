"""Models whose sums could not be right are refused, by name and with the way out."""

from __future__ import annotations

import pytest
import torch
from engine_checks import batch_for, quadratic, run_engine
from torch import nn

from tacit import PerSampleClip
from tacit.errors import MixesRecords, UnsupportedModule
from tacit.queries import BookKeeping, PerRecord

D = 5


def reals(n):
    return torch.randn(n, D, dtype=torch.float64)


def sequences(n):
    return torch.randn(n, 3, D, dtype=torch.float64)


def tokens(n):
    return torch.randint(0, 7, (n, 4))


class BatchMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        h = self.layer(x)
        return h - h.mean(dim=0)


class Borrowed(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return self.layer(x) @ self.layer.weight


class Positions(nn.Module):
    """An embedding of positions that has no rows for records."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(9, D)

    def forward(self, x):
        return x + self.positions(torch.arange(x.shape[1]))


class Overwrites(nn.Module):
    """Changes a layer's input after the layer has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        x = x.clone()
        y = self.layer(x)
        x.zero_()
        return y


class Offsets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, D)

    def forward(self, x):
        return self.bag(x.flatten(), torch.arange(len(x)) * x.shape[1])


class RandomRaw(nn.Module):
    """Its own parameters beside dropout: to run it again would draw again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(x * self.scale)


@pytest.mark.parametrize(
    ("make", "draw", "says"),
    [
        (BatchMean, reals, "PerRecord"),
        (Borrowed, reals, "used outside its layer"),
        (Positions, sequences, "Embedding saw"),
        (Offsets, tokens, "offsets"),
        (RandomRaw, reals, "RandomRaw"),
    ],
)
def test_what_cannot_be_right_is_refused(make, draw, says):
    model = make().double()
    for count in (4, 5):
        with pytest.raises(UnsupportedModule, match=says):
            PerSampleClip(1.0)(model, quadratic, batch_for(draw(count)))


@pytest.mark.parametrize("engine", [BookKeeping(), PerRecord()])
def test_a_table_that_rewrites_itself_is_refused_by_every_engine(engine):
    model = nn.Embedding(9, D, max_norm=1.0).double()
    with pytest.raises(MixesRecords, match="without max_norm"):
        PerSampleClip(1.0, engine=engine)(model, quadratic, batch_for(tokens(4)))


def test_an_input_overwritten_after_use_is_refused():
    with pytest.raises(UnsupportedModule, match="overwritten"):
        run_engine(Overwrites().double(), batch_for(reals(1)))
