"""A check is asked again when what a branch of Python would test has changed, and only then."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tacit
from tacit.checks.side_effects import function_kind
from tacit.engines import BookKeeping, PerRecord
from tacit.errors import MixesRecords

torch.set_num_threads(1)
ROWS, LABELS = torch.randn(6, 4), torch.arange(6) % 3


def batch():
    return tacit.sampling.batch_of(ROWS, LABELS, divisor=6, scheme=tacit.sampling.Poisson(0.5))


class Centred(nn.Module):
    """Subtracts the batch's mean where a flag says so; the autograd graph is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.centre: bool | str | int | None = False
        self.passes, self.temperature = 0, 1.0

    def forward(self, x):
        hidden = self.first(x)
        self.passes += 1
        shift = hidden.detach().mean(0, True) if self.centre else hidden.detach() * 0
        return self.last(hidden - shift)


def plain(logits, labels, centre=False):
    shift = logits.detach().mean(0, True) if centre else logits.detach() * 0
    return F.cross_entropy(logits - shift, labels, reduction="none")


class Loss:
    def __init__(self, centre: bool) -> None:
        self.centre = centre

    def __call__(self, logits, labels):
        return plain(logits, labels, self.centre)

    def method(self, logits, labels):
        return plain(logits, labels, self.centre)


class ModuleLoss(nn.Module):
    def __init__(self, centre: bool) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.centre = centre

    def forward(self, logits, labels):
        return plain(logits, labels, self.inner.centre)


def closure(centre: bool):
    return lambda logits, labels: plain(logits, labels, centre)


def default(centre: bool):
    def loss(logits, labels, centre=centre, *, word=centre):
        return plain(logits, labels, centre and word)

    return loss


LOSSES = {
    "partial": lambda centre: partial(plain, centre=centre),
    "partial of a partial": lambda centre: partial(partial(plain, centre=centre)),
    "partial of an object": lambda centre: partial(Loss(centre)),
    "callable class": Loss,
    "bound method": lambda centre: Loss(centre).method,
    "module": ModuleLoss,
    "closure": closure,
    "closure of an object": lambda centre: (lambda loss: lambda x, y: loss(x, y))(Loss(centre)),
    "closure of a closure": lambda centre: (lambda loss: lambda x, y: loss(x, y))(closure(centre)),
    "default": default,
}


@pytest.mark.parametrize("engine", [None, BookKeeping])
@pytest.mark.parametrize("value", [True, "batch", 1])
def test_a_flag_of_a_module_is_turned_after_a_step(engine, value):
    model, query = Centred(), tacit.PerSampleClip(1.0, engine=engine and engine())
    for _ in range(2):
        query(model, plain, batch())
    model.centre = value
    with pytest.raises(MixesRecords, match="mean"):
        query(model, plain, batch())
    model.centre = None
    query(model, plain, batch())


@pytest.mark.parametrize("made", LOSSES.values(), ids=LOSSES)
def test_a_flag_of_a_loss_is_turned_after_a_step(made):
    model, query = nn.Linear(4, 3), tacit.PerSampleClip(1.0)
    for _ in range(2):
        query(model, made(False), batch())
    with pytest.raises(MixesRecords, match="mean"):
        query(model, made(True), batch())


@pytest.mark.parametrize("made", LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_made_anew_is_the_same(made):
    assert function_kind(made(False)) == function_kind(made(False)) != function_kind(made(True))
    assert hash(function_kind(made(False))) == hash(function_kind(made(False)))


def test_tensors_and_floats_of_a_loss_do_not_matter():
    def made(weight, rate):
        return partial(lambda x, y, rate: rate * F.cross_entropy(x, y, weight), rate=rate)

    assert function_kind(made(torch.ones(3), 0.1)) == function_kind(made(torch.zeros(3), 0.2))


def test_two_builtin_functions_are_two_kinds():
    assert function_kind(torch.add) != function_kind(torch.sub)


def test_a_function_that_calls_itself_has_a_kind():
    def loss(depth):
        return loss(depth - 1) if depth else 0

    assert hash(function_kind(loss)) == hash(function_kind(loss))


def test_counters_and_temperatures_cause_few_checks():
    """A step takes one pass per record, and more where the model is checked."""
    passes, checked = [], 0

    def loss(outputs, targets):
        passes.append(1)
        return plain(outputs, targets)

    model, query = Centred(), tacit.PerSampleClip(1.0, engine=PerRecord())
    for _ in range(40):
        model.temperature *= 0.9
        passes.clear()
        query(model, loss, batch())
        checked += len(passes) > len(ROWS)
    assert checked <= 11  # eight for the counter, which is none after that, and two of its own


def test_batch_clipping_takes_another_engine_when_a_flag_is_turned():
    """Records may meet in a mini-set: the same verdict whether or not the flag was set first."""
    data = tacit.Records(ROWS, LABELS, num_classes=3, public_size=6)
    sampler = tacit.MiniSetSampler(data, 3, steps=2, rate=1.0, seed=0)
    model, query = Centred(), tacit.BatchClip(1.0, 3)
    query(model, plain, sampler.next_batch())
    model.centre = True
    query(model, plain, sampler.next_batch())
