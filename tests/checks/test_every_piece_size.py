"""One verdict on a model, whatever the route, the engine and the size of the pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from checked_models import (
    CLASSES,
    KEPT,
    LEGAL,
    STATEFUL,
    AfterTheThird,
    D,
    LateCounter,
    RunningMean,
)
from torch import nn

import tacit
from tacit import PerSampleClip, Records
from tacit.engines import BookKeeping, PerRecord
from tacit.errors import MixesRecords
from tacit.sampling import Poisson
from tacit.sampling.batch import Batch

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
