"""The engine that is used where none is named: what it records, what it pads, the same sums."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F
from engine_checks import assert_same
from hypothesis import given
from hypothesis import strategies as st
from test_replay_without_gpu import AsIfOnGpu, stand_in
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import tacit
from tacit import Augmentation, PerSampleClip
from tacit.queries.bounded_gradient import trainable
from tacit.queries.engines import Automatic, BookKeeping, Task, replay, scaling_triton
from tacit.queries.engines.recordable import recordable
from tacit.queries.engines.when_to_record import padded, rows_for

LOSS = tacit.losses.CrossEntropy()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(replay, "capture", stand_in)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(scaling_triton, "fits", lambda x_B: False)  # where there is a GPU as well


class Own(nn.Module):
    """A forward pass that a user wrote; this one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.turn = nn.Linear(4, 2), 0

    def forward(self, x):
        self.turn += 1
        return self.one(x)


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Dropout(0.0), nn.Linear(5, 2)]
    return nn.Sequential(*layers).double()


def task(model: nn.Module, loss: object = LOSS, **options) -> Task:
    names = tuple(trainable(model))
    return Task(model, loss, trainable(model), (names,), (0.5,), **options)


def piece_of(count: int, *, as_if_on_gpu: bool = True, max_physical: int | None = None):
    torch.manual_seed(count)
    inputs, targets = torch.randn(count, 4).double(), torch.randint(0, 2, (count,))
    batch = tacit.batch_of(
        inputs, targets, divisor=1.0, scheme=tacit.Poisson(0.5), max_physical=max_physical
    )
    if not as_if_on_gpu:
        return batch
    return dataclasses.replace(batch, indices=batch.indices.as_subclass(AsIfOnGpu))


def plain(tensors):
    return {name: tensor.as_subclass(torch.Tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.usefixtures("no_gpu")
def test_the_sums_are_those_of_book_keeping_whatever_the_size(views):
    model, engine = network(), Automatic()
    for count in (32, 33, 34, 32, 35, 33, 46, 2, 2, 2, 32, 36, 48):
        count -= count % views
        asked = task(model, views=views, counted=True)
        found = engine.clipped_sums(asked, piece_of(count))
        expected = BookKeeping().clipped_sums(asked, piece_of(count, as_if_on_gpu=False))
        assert_same(plain(found.sums), expected.sums)
        assert float(found.counts[0]) == pytest.approx(float(expected.counts[0]))
    sizes = {key[2][0] for key in engine._replay._recordings}
    # 46 and 48 came once; 33 and 34 share a size.
    assert sizes == ({2, 32, 34, 36} if views == 1 else {2, 32, 34})


@pytest.mark.usefixtures("no_gpu")
def test_whether_a_step_was_recorded_does_not_show_in_the_last_bit():
    """Which sizes have come before is private; the other records' terms must not depend on it."""
    model = network().float()
    for count in (33, 47, 61):
        engine, found = Automatic(), []
        piece = piece_of(count)
        records = dataclasses.replace(piece.records, inputs=piece.records.inputs.float())
        piece = dataclasses.replace(piece, records=records)
        asked = task(model, counted=True)
        for _ in range(4):  # eager, recording, replayed twice
            one = engine.clipped_sums(asked, piece)
            found.append({name: s.clone() for name, s in plain(one.sums).items()})
        assert len(engine._replay._recordings) == 1
        for other in found[1:]:
            for name, total in found[0].items():
                assert torch.equal(total, other[name])


@pytest.mark.usefixtures("no_gpu")
def test_a_size_is_recorded_when_it_comes_again():
    model, engine = network(), Automatic()
    engine.clipped_sums(task(model), piece_of(32))
    assert not engine._replay._recordings
    engine.clipped_sums(task(model), piece_of(32))
    assert len(engine._replay._recordings) == 1
    engine.forget()
    assert not engine._replay._recordings


@pytest.mark.usefixtures("no_gpu")
def test_a_forward_pass_of_the_users_own_runs_every_time():
    model, engine = Own().double(), Automatic()
    asked = Task(model, LOSS, trainable(model), (tuple(trainable(model)),), (0.5,))
    turns = []
    for _ in range(6):
        engine.clipped_sums(asked, piece_of(32))
        turns.append(model.turn)
    assert not engine._replay._recordings
    assert len(set(turns)) == 6


class Net(nn.Module):
    """As users write them: functions of PyTorch, a method of its own, a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.slope = nn.Linear(4, 8), nn.Linear(8, 2), 0.1

    def features(self, x):
        return F.leaky_relu(self.first(x), self.slope) if self.training else self.first(x)

    def forward(self, x):
        x = x.view(x.size(0), -1)
        return self.second(torch.cat([part for part in self.features(x).chunk(2, 1)], dim=1))


class Inherits(Net):
    pass


class PythonDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x):
        return self.body(x) if random.random() < 0.5 else self.body(-x)


class DrawsOnTheCpu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x):
        return self.body(x) if torch.rand(1) < 0.5 else self.body(-x)


SCALE = 2.0


class ReadsAGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x):
        return SCALE * self.body(x)


class ReadsAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scales = nn.Linear(4, 2), [1.0, 2.0]

    def forward(self, x):
        return self.scales[0] * self.body(x)


class ReadsATensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(4, 2), torch.ones(())

    def forward(self, x):
        return self.scale * self.body(x)


class CountsInABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.body(x)


class AsksAPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.body.scales = [1.0, 2.0]

    def forward(self, x):
        return self.body.scales[0] * self.body(x)


class CallsAHelper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x):
        return spectral(self.body(x))


def spectral(x):
    return x * random.random()


def closed_over() -> nn.Module:
    counts = [0]

    class Closes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 2)

        def forward(self, x):
            counts[0] += 1
            return self.body(x)

    return Closes()


def patched() -> nn.Module:
    model = Net()
    model.forward = lambda x: model.second(model.first(x))
    return model


def hooked() -> nn.Module:
    model = network()
    model[0].register_forward_hook(lambda *_: None)
    return model


def parametrized() -> nn.Module:
    model = network()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


class Derived(nn.Linear):
    pass


CASES = {
    "layers": (network, LOSS, True),
    "pytorch's loss": (network, nn.CrossEntropyLoss(reduction="none"), True),
    "ours": (tacit.models.cifar_cnn, LOSS, True),
    "a residual network": (tacit.models.wide_resnet, LOSS, True),
    "own forward that counts": (Own, LOSS, False),
    "own forward": (Net, LOSS, True),
    "inside ours": (lambda: nn.Sequential(Net(), nn.ReLU()), LOSS, True),
    "inherits a forward": (Inherits, LOSS, False),
    "draws in Python": (PythonDraws, LOSS, False),
    "draws on the CPU": (DrawsOnTheCpu, LOSS, False),
    "reads a global": (ReadsAGlobal, LOSS, False),
    "reads a list": (ReadsAList, LOSS, False),
    "reads a tensor that is no buffer": (ReadsATensor, LOSS, False),
    "calls a helper": (CallsAHelper, LOSS, False),
    "counts in a buffer": (CountsInABuffer, LOSS, False),
    "asks a part for a list": (AsksAPart, LOSS, False),
    "closes over a list": (closed_over, LOSS, False),
    "a patched forward": (patched, LOSS, False),
    "derived": (lambda: nn.Sequential(Derived(4, 2)), LOSS, False),
    "own loss": (network, lambda outputs, targets: outputs.sum(1), False),
    "hooked": (hooked, LOSS, False),
    "parametrized": (parametrized, LOSS, False),
    "recurrent": (lambda: nn.GRU(4, 2), LOSS, False),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_recorded_by_itself(case):
    build, loss, expected = CASES[case]
    model = build()
    assert recordable(model, loss) is expected


def test_nothing_is_recorded_while_all_modules_have_a_hook():
    handle = register_module_forward_hook(lambda *_: None)
    try:
        assert not recordable(network(), LOSS)
    finally:
        handle.remove()
    assert recordable(network(), LOSS)


def test_a_loss_that_looks_inside_is_recorded_while_the_model_is_watched():
    model, loss = network(), tacit.losses.TailoredLoss(0, 1.0, 2.0)
    with tacit.losses.watched(model, loss):
        assert recordable(model, loss)


@given(
    count=st.integers(1, 5000),
    views=st.sampled_from([1, 2, 3, 8]),
    limit=st.none() | st.integers(1, 5000),
)
def test_padding_is_little_and_of_whole_records(count, views, limit):
    count *= views
    if limit is not None:
        count = min(count, limit * views)
    piece = tacit.Batch(
        tacit.Records(torch.zeros(1, 1), torch.zeros(1)),
        torch.zeros(count, dtype=torch.long),
        1.0,
        tacit.Poisson(0.5),
        max_physical=None if limit is None else limit * views,
    )
    rows = rows_for(piece, views)
    assert rows % views == 0
    least = 0 if limit is None else limit * views / 8 + views
    assert count <= rows <= count + max(count / 16, least) + views
    if limit is not None:
        assert rows <= limit * views


@given(count=st.integers(1, 40), more=st.integers(0, 9))
def test_padded_rows_count_for_nobody(count, more):
    piece = piece_of(count, as_if_on_gpu=False)
    longer = padded(piece, count + more)
    assert len(longer) == count + more
    assert int(longer.mask.sum()) == count
    assert torch.equal(longer.inputs[:count], piece.inputs)


def test_it_is_the_default_and_takes_views_on_a_cpu():
    query = PerSampleClip(0.5, augmentation=Augmentation(2, torch.clone))
    assert isinstance(query.engine, Automatic)
    batch = piece_of(7, as_if_on_gpu=False)
    named = PerSampleClip(0.5, augmentation=Augmentation(2, torch.clone), engine=BookKeeping())
    model = network()
    found, expected = query(model, LOSS, batch), named(model, LOSS, batch)
    for one, other in zip(found.blocks, expected.blocks, strict=True):
        for a, b in zip(one.sums, other.sums, strict=True):
            assert torch.equal(a, b)
