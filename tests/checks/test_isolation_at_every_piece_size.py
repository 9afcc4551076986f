"""One verdict on a model, whatever the route, the engine and the size of the pieces."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tacit
from tacit import PerSampleClip, Records
from tacit.engines import BookKeeping, PerRecord
from tacit.errors import MixesRecords
from tacit.sampling import Poisson
from tacit.sampling.sampler import Batch

# --- models that keep something from pass to pass, and models that only seem to ---------------

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


# --- verdicts -------------------------------------------------------------------------------

N = 12
LOCAL = tacit.queries.LocalRun(lambda parameters: torch.optim.SGD(parameters, lr=0.1), at_once=2)
PER_SAMPLE = {
    "whole": (None, BookKeeping),
    "pieces of two": (2, BookKeeping),
    "pieces of one": (1, BookKeeping),
    "automatic, one": (1, lambda: None),
    "each record alone": (None, PerRecord),
    "each alone, pieces of one": (1, PerRecord),
}
SETS = {
    "set by set": lambda: tacit.BatchClip(0.1, 3, engine=tacit.queries.SetBySet()),
    "sets as records": lambda: tacit.BatchClip(0.1, 3, engine=tacit.queries.SetsAsRecords()),
    "local runs": lambda: tacit.BatchClip(0.1, 3, gradient=LOCAL),
}


def records(n: int = N) -> Records:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, D, generator=generator)
    inputs[:, 0] = torch.arange(n) % 5  # a category code
    return Records(inputs, torch.arange(n) % CLASSES, num_classes=CLASSES, public_size=n)


def batch(rows: list[int], max_physical: int | None = None, n: int = N) -> Batch:
    return Batch(
        records(n), torch.tensor(rows, dtype=torch.long), N, Poisson(0.5), max_physical=max_physical
    )


def ask(how: str, model: nn.Module) -> None:
    if how in SETS:
        drawn = tacit.MiniSetSampler(records(), 3, steps=1, rate=1.0, seed=0).next_batch()
        SETS[how]()(model, F.cross_entropy, drawn)
    else:
        size, engine = PER_SAMPLE[how]
        query = PerSampleClip(1.0, engine=engine())
        query(model, F.cross_entropy, batch(list(range(N)), size))


@pytest.mark.parametrize("how", [*PER_SAMPLE, *SETS])
@pytest.mark.parametrize("make", STATEFUL)
def test_a_stateful_model_is_refused(how: str, make: type[nn.Module]) -> None:
    KEPT.clear()
    torch.manual_seed(0)
    with pytest.raises(MixesRecords, match=r"is stateful|writes values|records meet"):
        ask(how, make())


@pytest.mark.parametrize("how", [*PER_SAMPLE, *SETS])
@pytest.mark.parametrize("kind", LEGAL)
def test_a_legal_model_is_taken(how: str, kind: str) -> None:
    torch.manual_seed(0)
    ask(how, LEGAL[kind]())


@pytest.mark.parametrize("kind", ["dropout of all kinds", "stochastic depth", "attention"])
@pytest.mark.parametrize("how", ["whole", "pieces of one", "each record alone", "set by set"])
def test_chance_decides_nothing(how: str, kind: str) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        ask(how, LEGAL[kind]())


@pytest.mark.parametrize("rows", [[], [3], [3, 3]])
@pytest.mark.parametrize("size", [1, None])
def test_a_batch_of_few_is_asked_with_other_records_of_its_dataset(rows, size) -> None:
    query = PerSampleClip(1.0)
    with pytest.raises(MixesRecords, match="is stateful"):
        query(RunningMean(), F.cross_entropy, batch(rows, size))
    query(nn.Linear(D, CLASSES), F.cross_entropy, batch(rows, size))


def test_padding_is_not_asked_with() -> None:
    """Rows outside the mask are records of the dataset too, and here one of them is not finite."""
    given = batch([0, 1, 2, 3])
    given.records.inputs[3] = float("nan")
    masked = given.with_mask(torch.tensor([True, True, True, False]))
    PerSampleClip(1.0)(nn.Linear(D, CLASSES), F.cross_entropy, masked)
    with pytest.raises(MixesRecords, match="is stateful"):
        PerSampleClip(1.0)(RunningMean(), F.cross_entropy, masked)


def test_a_dataset_of_one_record_can_still_show_a_count() -> None:
    with pytest.raises(MixesRecords, match="is stateful"):
        PerSampleClip(1.0)(AfterTheThird(), F.cross_entropy, batch([0], n=1))
    PerSampleClip(1.0)(nn.Linear(D, CLASSES), F.cross_entropy, batch([0], n=1))


@pytest.mark.parametrize("how", ["pieces of one", "each alone, pieces of one"])
def test_what_begins_late_is_found_by_the_eighth_step(how: str) -> None:
    """The check restores the counter, so 40 passes are 40 rows: in the fourth step."""
    size, engine = PER_SAMPLE[how]
    query, model = PerSampleClip(1.0, engine=engine()), LateCounter(40)

    def steps() -> Iterator[int]:
        for step in range(1, 10):
            query(model, F.cross_entropy, batch(list(range(N)), size))
            yield step

    taken: list[int] = []
    with pytest.raises(MixesRecords, match="is stateful"):
        taken.extend(steps())
    assert 3 <= len(taken) <= 7


def test_a_check_leaves_the_model_and_the_generators_as_they_were() -> None:
    model = LEGAL["notes and caches"]()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    PerSampleClip(1.0, engine=PerRecord())(model, F.cross_entropy, batch([]))
    assert torch.equal(before, torch.get_rng_state())
    assert model.calls == 0
    assert "last" not in vars(model)


def test_where_memory_ends_fewer_records_are_asked_with() -> None:
    class Large(RunningMean):
        def forward(self, x):
            if len(x) > 2:
                raise torch.OutOfMemoryError("no room for so many records")
            return super().forward(x)

    with pytest.raises(MixesRecords, match="is stateful"):
        PerSampleClip(1.0)(Large(), F.cross_entropy, batch(list(range(N)), 2))


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.layer(x - 1e-6 * x.mean(0))


class BySize(Mixes):
    def forward(self, x):
        return self.layer(x / len(x))


@pytest.mark.parametrize("make", [Mixes, BySize])
@pytest.mark.parametrize("how", ["whole", "pieces of two", "pieces of one", "sets as records"])
def test_records_that_meet_are_refused_at_every_piece_size(how: str, make) -> None:
    with pytest.raises(MixesRecords, match=r"records meet|how many records"):
        ask(how, make())


@pytest.mark.parametrize("seed", range(4))
def test_a_running_mean_is_refused_with_and_without_the_record_that_moved_it(seed: int) -> None:
    """One replaced record moved the sum of 64 by 28 and more, where 1.0 is declared."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(64, D, generator=generator), torch.arange(64) % CLASSES
    torch.manual_seed(seed)
    for engine in (None, PerRecord()):
        for first in (x[0], torch.full((D,), 1e4)):
            inputs = torch.cat([first[None], x[1:]])
            given = tacit.sampling.batch_of(
                inputs, y, divisor=64, scheme=Poisson(0.5), max_physical=1
            )
            with pytest.raises(MixesRecords, match="is stateful"):
                PerSampleClip(1.0, engine=engine)(RunningMean(), F.cross_entropy, given)
