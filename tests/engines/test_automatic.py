"""The engine that is used where none is named: what it pads, and the same sums."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
from engine_checks import assert_same, batch_for, quadratic, recording_engine, sums_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tacit
from tacit import PerSampleClip
from tacit.data import Augmentation
from tacit.engines import Automatic, BookKeeping, ClipTask, Recorder
from tacit.engines.recorder import padded, rows_for
from tacit.queries.bounded_gradient import trainable

LOSS = tacit.losses.CrossEntropy()


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Dropout(0.0), nn.Linear(5, 2)]
    return nn.Sequential(*layers).double()


def task(model: nn.Module, loss: object = LOSS, **options) -> ClipTask:
    names = tuple(trainable(model))
    return ClipTask(model, loss, trainable(model), (names,), (0.5,), **options)


def piece_of(count: int, *, max_physical: int | None = None):
    torch.manual_seed(count)
    inputs, targets = torch.randn(count, 4).double(), torch.randint(0, 2, (count,))
    return tacit.sampling.batch_of(
        inputs, targets, divisor=1.0, scheme=tacit.sampling.Poisson(0.5), max_physical=max_physical
    )


@pytest.mark.parametrize("views", [1, 2])
def test_the_sums_are_those_of_book_keeping_whatever_the_size(views):
    model, engine = network(), Automatic()
    for count in (32, 33, 34, 32, 35, 33, 46, 2, 2, 2, 32, 36, 48):
        count -= count % views
        asked = task(model, views=views, counted=True)
        found = engine.clipped_sums(asked, piece_of(count))
        expected = BookKeeping().clipped_sums(asked, piece_of(count))
        assert_same(found.sums, expected.sums)
        assert float(found.counts[0]) == pytest.approx(float(expected.counts[0]))


def test_whether_a_size_came_before_does_not_show_in_the_last_bit():
    """Which sizes have come before is private; the other records' terms must not depend on it."""
    model = network()
    for count in (33, 47, 61):
        engine, piece, asked = Automatic(), piece_of(count), task(model, counted=True)
        found = [engine.clipped_sums(asked, piece).sums for _ in range(4)]
        for other in found[1:]:
            for name, total in found[0].items():
                assert torch.equal(total, other[name])


class PythonDraws(nn.Module):
    """Takes one of two ways, by a draw of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x):
        return self.body(x) if random.random() < 0.5 else self.body(-x).tanh()


def test_another_path_through_the_model_is_planned_and_not_confused():
    model, engine = PythonDraws().double(), Automatic()
    for step in range(12):
        random.seed(step)
        found = engine.clipped_sums(task(model), piece_of(5))
        random.seed(step)
        expected = BookKeeping().clipped_sums(task(model), piece_of(5))
        assert_same(found.sums, expected.sums)


def test_a_model_that_is_gone_leaves_no_plan_for_the_next():
    """Plans are kept by identity: another model may come to lie where one has gone."""
    engine = Automatic()
    for width in (3, 5, 7, 3, 9):
        torch.manual_seed(width)
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).double()
        asked = task(model, quadratic)
        for _ in range(2):
            found = engine.clipped_sums(asked, piece_of(6))
            assert_same(found.sums, BookKeeping().clipped_sums(asked, piece_of(6)).sums)
        del model, asked


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])
def test_a_copied_engine_begins_anew(copied):
    model, engine = network(), recording_engine()
    for _ in range(4):
        engine.clipped_sums(task(model), piece_of(8))
    assert engine.recorder.num_recorded == 1
    other = copied(engine)
    assert not other.recorder.num_recorded
    found, expected = (e.clipped_sums(task(model), piece_of(8)) for e in (other, engine))
    assert_same(found.sums, expected.sums)


def test_forget_gives_recordings_back():
    model, engine = network(), recording_engine()
    for _ in range(4):
        engine.clipped_sums(task(model), piece_of(8))
    assert engine.recorder.num_recorded == 1
    engine.forget()
    assert not engine.recorder.num_recorded


def batch_of_rows(count: int, expected: float, limit: int | None = None) -> tacit.Batch:
    records = tacit.Records(torch.zeros(1, 1), torch.zeros(1))
    rows = torch.zeros(count, dtype=torch.long)
    return tacit.Batch(records, rows, expected, tacit.sampling.Poisson(0.5), max_physical=limit)


@given(
    count=st.integers(1, 5000),
    views=st.sampled_from([1, 2, 3, 8]),
    limit=st.none() | st.integers(1, 5000),
    expected=st.floats(1.0, 5000.0),
)
def test_padding_is_of_whole_records_and_within_limits(count, views, limit, expected):
    count *= views
    if limit is not None:
        limit *= views
        count = min(count, limit)
    rows = rows_for(batch_of_rows(count, expected, limit), views)
    assert rows % views == 0
    assert count <= rows <= max(2 * count, views, 0 if limit is None else limit / 8 + views)
    if limit is not None:
        assert rows <= limit


@pytest.mark.parametrize("expected", [64, 256, 1024, 4096])
def test_poisson_batches_have_few_shapes(expected):
    torch.manual_seed(0)
    counts = torch.poisson(torch.full((2000,), float(expected))).long().tolist()
    rows = [rows_for(batch_of_rows(count, float(expected))) for count in counts]
    assert len(set(rows)) <= 4
    assert sum(rows) / len(rows) <= expected + expected**0.5
    assert rows_for(batch_of_rows(expected, float(expected))) == expected
    cut = [rows_for(batch_of_rows(n, float(expected), 32)) for n in range(1, 33)]
    assert sorted(set(cut)) == [4, 8, 12, 16, 20, 24, 28, 32]


@given(count=st.integers(1, 200), views=st.sampled_from([1, 2]))
def test_padded_rows_count_for_nobody(count, views):
    piece = piece_of(count * views)
    longer = padded(piece, views)
    assert len(longer) == rows_for(piece, views) >= len(piece)
    full = len(longer) == len(piece)
    assert longer is piece if full else int(longer.mask.sum()) == len(piece)
    assert torch.equal(longer.inputs[: len(piece)], piece.inputs)


def test_it_is_the_default_and_takes_views_on_a_cpu():
    query = PerSampleClip(0.5, augmentation=Augmentation(2, torch.clone))
    assert isinstance(query.engine, Automatic)
    batch = piece_of(7)
    named = PerSampleClip(0.5, augmentation=Augmentation(2, torch.clone), engine=BookKeeping())
    model = network()
    found, expected = query(model, LOSS, batch), named(model, LOSS, batch)
    for one, other in zip(found.blocks, expected.blocks, strict=True):
        for a, b in zip(one.sums, other.sums, strict=True):
            assert torch.equal(a, b)


def test_one_record_does_not_decide_when_the_others_are_compiled():
    """Compiled bfloat16 rounds differently, and the number of pieces of a shape is private."""

    def sums_after(first: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()
        inputs, targets = torch.randn(40, 6).bfloat16(), torch.ones(40)
        engine = Automatic(Recorder(after=1))
        engine.expect(10**9)
        query = PerSampleClip(0.1, engine=engine)
        found = []
        for count in (first, 32, 32, 31, 40, 32):
            batch = batch_for(inputs[:count], targets[:count], max_physical=8)
            found.append(torch.cat([s.flatten() for s in sums_of(query, model, batch).values()]))
        assert engine.recorder.num_recorded > 0
        return found

    # Two pieces of eight records, and one of them with a piece of seven.
    for one, other in list(zip(sums_after(16), sums_after(15), strict=True))[1:]:
        assert torch.equal(one, other)
