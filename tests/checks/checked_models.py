"""Models that remember, in many places and at many occasions, and models that only seem to."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import nn

D, CLASSES = 4, 3


class Base(nn.Module):
    """A linear layer on what `shift` makes of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, CLASSES)
        self.mean = torch.zeros(D)
        self.calls = 0

    def forward(self, x):
        return self.layer(self.shift(x))

    def shift(self, x):
        return x


class RunningMean(Base):
    """The attack: a running mean in an attribute."""

    def shift(self, x):
        shifted = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return shifted


class InTraining(RunningMean):
    def shift(self, x):
        return super().shift(x) if self.training else x - self.mean


class OfSingleRows(Base):
    """Writes when the batch has one row."""

    def shift(self, x):
        shifted = x - self.mean
        if len(x) == 1:
            self.mean = x.detach().mean(0)
        return shifted


class AfterTheThird(Base):
    def shift(self, x):
        self.calls += 1
        return x if self.calls <= 3 else 2 * x


class FirstBatch(Base):
    """Set once, from the first records, and never again."""

    first = None

    def shift(self, x):
        if self.first is None:
            self.first = x.detach().mean(0)
        return x - self.first


class LastRecord(Base):
    def shift(self, x):
        shifted = x + 0.1 * self.mean
        self.mean = x.detach()[-1]
        return shifted


class InPlace(Base):
    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.zeros(D)]

    def shift(self, x):
        shifted = x - self.held[0]
        self.held[0].lerp_(x.detach().mean(0), 0.1)
        return shifted


class Closure(Base):
    """In a cell; set once."""

    def __init__(self) -> None:
        super().__init__()
        first = None

        def shift(x):
            nonlocal first
            if first is None:
                first = x.detach().mean(0)
            return x - first

        self.shift = shift


KEPT: dict[str, torch.Tensor] = {}


class Global(Base):
    """In a global; set once."""

    def shift(self, x):
        return x - KEPT.setdefault("first", x.detach().mean(0))


class OnTheClass(Base):
    seen = 0.0

    def shift(self, x):
        shifted = x + 0.1 * type(self).seen
        type(self).seen = x.detach().mean()
        return shifted


class Data(Base):
    """A buffer, through `.data`, which moves no version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(D))

    def shift(self, x):
        self.count.data.add_(x.detach().mean(0))
        return x - self.count


STATEFUL = [
    RunningMean,
    InTraining,
    OfSingleRows,
    AfterTheThird,
    FirstBatch,
    LastRecord,
    InPlace,
    Closure,
    Global,
    OnTheClass,
    Data,
]


class LateCounter(Base):
    """Changes after many passes."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late

    def shift(self, x):
        self.calls += 1
        return x if self.calls <= self.late else x * (1 + self.calls)


class Harmless(Base):
    """Counts, logs, keeps its last output, and builds a table when it first needs one."""

    table = None

    def shift(self, x):
        self.calls += 1
        logging.getLogger(__name__).debug("call %d", self.calls)
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1])
        self.last = x + self.table
        return self.last


class Dropouts(Base):
    """Dropout as a module, as a function, and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def shift(self, x):
        x = F.dropout(self.drop(x), 0.3, self.training)
        q = x.reshape(len(x), 1, 2, 2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4).reshape(len(x), D)


class StochasticDepth(Base):
    def shift(self, x):
        keep = torch.rand(len(x), 1) < 0.7
        return x + keep * x.tanh()


class Categories(nn.Module):
    """A table's rows: a category code, stored as a float, beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 3), nn.Linear(3 + D - 1, CLASSES)

    def forward(self, x):
        return self.layer(torch.cat([self.table(x[:, 0].long()), x[:, 1:]], dim=1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(1, 5, num_layers=2, dropout=0.3, batch_first=True)
        self.layer = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.layer(self.rows(x.unsqueeze(-1))[0][:, -1])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.layer(self.block(x.unsqueeze(1).expand(-1, 2, -1)).mean(1))


def normed(norm) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(D, 6)), nn.Tanh(), nn.Linear(6, CLASSES))


LEGAL = {
    "notes and caches": Harmless,
    "dropout of all kinds": Dropouts,
    "stochastic depth": StochasticDepth,
    "category codes": Categories,
    "recurrent": Recurrent,
    "attention": Attentive,
    "spectral norm": lambda: normed(nn.utils.parametrizations.spectral_norm),
    "older spectral norm": lambda: normed(nn.utils.spectral_norm),
    "weight norm": lambda: normed(nn.utils.parametrizations.weight_norm),
}
