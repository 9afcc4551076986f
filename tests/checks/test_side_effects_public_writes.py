"""Buffers may be written with public numbers: caches, counters, power iterations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

import tacit
from tacit.engines import BookKeeping, PerRecord
from tacit.errors import MixesRecords
from tacit.queries import SetBySet, SetsAsRecords

torch.set_num_threads(1)
RECORDS, TIME, WIDTH = 6, 4, 4
DATA = tacit.Records(
    torch.randn(RECORDS, TIME, WIDTH, generator=torch.Generator().manual_seed(0)),
    torch.arange(RECORDS) % 3,
    num_classes=3,
    public_size=RECORDS,
)
QUERIES = {
    "automatic": lambda: tacit.PerSampleClip(1.0),
    "book-keeping": lambda: tacit.PerSampleClip(1.0, engine=BookKeeping()),
    "per record": lambda: tacit.PerSampleClip(1.0, engine=PerRecord()),
    "sets": lambda: tacit.BatchClip(1.0, 3),
    "sets as records": lambda: tacit.BatchClip(1.0, 3, engine=SetsAsRecords()),
    "set by set": lambda: tacit.BatchClip(1.0, 3, engine=SetBySet()),
}
FOR_ALL = pytest.mark.parametrize("make", QUERIES.values(), ids=QUERIES)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def step(model: nn.Module, query, rows: Tensor | None = None):
    if isinstance(query, tacit.BatchClip):
        sampler = tacit.MiniSetSampler(DATA, 3, steps=1, rate=1.0, seed=0)
        return query(model, loss, sampler.next_batch())
    inputs = DATA.inputs if rows is None else rows
    batch = tacit.sampling.batch_of(
        inputs,
        torch.arange(len(inputs)) % 3,
        divisor=6,
        scheme=tacit.sampling.Poisson(0.5),
    )
    return query(model, loss, batch)


class Net(nn.Module):
    """Writes something in each pass, after its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 5), nn.Linear(5, 3)
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.register_buffer("held", torch.zeros(8, 5))
        self.register_buffer("empty", None, persistent=False)
        self.filled, self.length = False, 0

    def write(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.write(self.first(x)).mean(1))


def angles(time: int) -> Tensor:
    return torch.outer(torch.arange(time), 0.1 * torch.arange(1.0, 6.0)).cos()


class Registered(Net):
    def write(self, hidden):
        if not hasattr(self, "cached"):
            self.register_buffer("cached", angles(hidden.shape[1]), persistent=False)
        return hidden * self.cached


class RegisteredByFlag(Net):
    def write(self, hidden):
        if not self.filled:
            self.register_buffer("cached", angles(hidden.shape[1]), persistent=False)
            self.filled = True
        return hidden * self.cached


class Assigned(Net):
    def write(self, hidden):
        if self.empty is None or len(self.empty) < hidden.shape[1]:
            self.empty = angles(hidden.shape[1])
        return hidden * self.empty[: hidden.shape[1]]


class FilledInPlace(Net):
    """As in rotary-embedding-torch: the buffer is there, and a number says how much is filled."""

    def write(self, hidden):
        if self.length < hidden.shape[1]:
            self.held[: hidden.shape[1]] = angles(hidden.shape[1])
            self.length = hidden.shape[1]
        return hidden * self.held[: hidden.shape[1]]


class FilledAgain(Net):
    def write(self, hidden):
        self.held[: hidden.shape[1]] = angles(hidden.shape[1])
        return hidden * self.held[: hidden.shape[1]].clone()


class Counts(Net):
    def write(self, hidden):
        self.n += 1
        return hidden


class CountsAnew(Net):
    def write(self, hidden):
        self.n = self.n + 1
        return hidden


class CountsInCheckpoint(Net):
    def write(self, hidden):
        return checkpoint(self._counted, hidden, use_reentrant=False)

    def _counted(self, hidden):
        self.n += 1
        return hidden.tanh()


class CountsTowardsRedraw(Net):
    """As in performer-pytorch, where features are drawn anew every thousand passes."""

    def write(self, hidden):
        if self.n >= 1000:
            self.held.normal_()
            self.n.zero_()
        self.n += 1
        return hidden


PUBLIC = [
    Registered,
    RegisteredByFlag,
    Assigned,
    FilledInPlace,
    FilledAgain,
    Counts,
    CountsAnew,
    CountsInCheckpoint,
    CountsTowardsRedraw,
]


@FOR_ALL
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", PUBLIC)
def test_public_writes_pass_in_every_step(kind, training, make):
    torch.manual_seed(0)
    model, query = kind().train(training), make()
    for _ in range(3):
        step(model, query)
    step(model, make())
    step(model.train(not training), query)


@FOR_ALL
@pytest.mark.parametrize("kind", [Registered, RegisteredByFlag, Assigned, FilledInPlace])
def test_a_cache_is_filled_and_used_for_every_record(kind, make):
    """The first step and a later one, when the cache is full, give the same."""
    torch.manual_seed(0)
    model, query = kind(), make()
    first, later = ([s for b in step(model, query).blocks for s in b.sums] for _ in range(2))
    for one, other in zip(first, later, strict=True):
        torch.testing.assert_close(one, other)
    cache = [b[:TIME] for _, b in model.named_buffers() if b.shape[-1:] == (5,)][-1]
    torch.testing.assert_close(cache, angles(TIME))


def test_a_cache_may_grow_with_the_length_of_the_records():
    model, query = Assigned(), tacit.PerSampleClip(1.0)
    for time in (2, 4, 3, 5):
        step(model, query, rows=torch.randn(RECORDS, time, WIDTH))


@FOR_ALL
@pytest.mark.parametrize("kind", [Counts, CountsAnew])
def test_a_count_of_passes_counts_steps(kind, make):
    """Where each record or mini-set has a pass of its own, too."""
    counted, query = kind(), make()
    for _ in range(3):
        step(counted, query)
    assert counted.n == 3


@FOR_ALL
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("normed", [spectral_norm, parametrizations.spectral_norm])
def test_spectral_normalisation_moves_its_vectors(normed, training, make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), normed(nn.Linear(TIME * WIDTH, 5)), nn.Linear(5, 3))
    for buffer in model.buffers():
        buffer.copy_(F.normalize(torch.randn_like(buffer), dim=0))
    model.train(training)
    query, before = make(), [b.clone() for b in model.buffers()]
    for _ in range(3):
        step(model, query)
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert moved == training


@pytest.mark.parametrize("normed", [spectral_norm, parametrizations.spectral_norm])
def test_a_local_run_moves_weights_and_keeps_the_vectors(normed):
    """There the vectors would be of weights that private records have moved."""
    torch.manual_seed(0)
    run = tacit.queries.LocalRun(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    model = nn.Sequential(nn.Flatten(), normed(nn.Linear(TIME * WIDTH, 5)), nn.Linear(5, 3))
    before = [b.clone() for b in model.buffers()]
    step(model, tacit.BatchClip(1.0, 3, gradient=run))
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


class CountsRecords(Net):
    def write(self, hidden):
        self.n += len(hidden)
        return hidden


class CacheOfTheBatch(Net):
    def write(self, hidden):
        self.empty = torch.ones(len(hidden))
        return hidden


class RunningMean(Net):
    def write(self, hidden):
        self.held[0].lerp_(hidden.detach().mean((0, 1)), 0.1)
        return hidden


class CountsByValue(Net):
    def write(self, hidden):
        if hidden.max() > 1e3:
            return hidden
        self.n += 1
        return hidden


class CountsSelected(Net):
    def write(self, hidden):
        self.n += len((hidden > 0).nonzero())
        return hidden


class ThroughData(Net):
    def write(self, hidden):
        self.held.data[0] = hidden.detach().mean((0, 1))
        return hidden


class PublicParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2), requires_grad=False)

    def write(self, hidden):
        self.table.add_(1)
        return hidden


class CountsAndRemembers(Net):
    """The public buffer is no excuse for the private one."""

    def write(self, hidden):
        self.n += 1
        self.held[0] = hidden.detach().mean((0, 1))
        return hidden


class RawMemory(Net):
    """Hands out its memory; what is written behind the dispatcher has no labels."""

    def write(self, hidden):
        hidden.data_ptr()
        self.n += 1
        return hidden


PRIVATE = [
    CountsRecords,
    CacheOfTheBatch,
    RunningMean,
    CountsByValue,
    CountsSelected,
    ThroughData,
    PublicParameter,
    CountsAndRemembers,
    RawMemory,
]


@FOR_ALL
@pytest.mark.parametrize("kind", PRIVATE)
@pytest.mark.filterwarnings("ignore:records of")
def test_everything_else_is_refused_every_time(kind, make):
    torch.manual_seed(0)
    model, query = kind(), make()
    for training in (True, True, False):
        with pytest.raises(MixesRecords):
            step(model.train(training), query)


def test_a_write_that_begins_later_is_proved_before_it_is_allowed():
    class Late(Net):
        private = False

        def write(self, hidden):
            if self.length > 0:
                self.n += hidden.detach().sum().long() if self.private else 1
            return hidden

    for private in (False, True):
        model, query = Late(), tacit.PerSampleClip(1.0)
        model.length, model.private = 0.0, private  # a float, whose changes cause no check
        step(model, query)
        model.length = 1.0
        if private:
            with pytest.raises(MixesRecords, match="'n'"):
                step(model, query)
        else:
            step(model, query)
            assert int(model.n) >= 1


def test_a_refused_model_does_not_keep_what_a_check_has_written():
    class Anew(Net):
        def write(self, hidden):
            self.held = hidden.detach().mean((0, 1))
            return hidden

    model = Anew()
    with pytest.raises(MixesRecords):
        step(model, tacit.PerSampleClip(1.0))
    assert torch.equal(model.held, torch.zeros(8, 5))


def test_an_operator_without_a_rule_leaves_a_counter_public():
    name = "tacit_tests::twice"
    if not hasattr(torch.ops.tacit_tests, "twice"):
        twice = torch.library.custom_op(
            name, lambda x: 2 * x, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        twice.register_autograd(lambda ctx, grad: 2 * grad)

    class Custom(Net):
        def write(self, hidden):
            self.n += 1
            return torch.ops.tacit_tests.twice(hidden)

    class Remembers(Net):
        def write(self, hidden):
            self.held[0] = torch.ops.tacit_tests.twice(hidden).detach().mean((0, 1))
            return hidden

    query = tacit.PerSampleClip(1.0)
    model = Custom()
    with pytest.warns(UserWarning, match="no rule for"):
        step(model, query)
    step(model, query)
    assert model.n == 2
    with pytest.raises(MixesRecords, match="held"):
        step(Remembers(), query)
