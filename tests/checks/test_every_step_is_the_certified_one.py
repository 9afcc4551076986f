"""A step that runs other operators than the certified pass is certified anew, before its release.

Python may take another way in any step: an augmentation of the batch with a probability, a schedule
that switches mixing on. The autograd graph does not always show it.
"""

from __future__ import annotations

import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tacit
from tacit.batch import batch_of
from tacit.errors import MixesRecords
from tacit.sampling.schemes import Poisson

STEPS, MIXED = 12, 5  # not a step at which a model is checked


class Network(nn.Module):
    """Mixes in one step of many, in a way that needs no gradient."""

    def __init__(self, change) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(6, 8), nn.Linear(8, 3), change
        self.schedule = {"step": 0}  # where no check of settings looks

    def forward(self, x: Tensor) -> Tensor:
        now = self.schedule["step"] == MIXED
        x = self.change(x, now)
        return self.last(self.first(x).tanh())


def centred(x, now):
    return x - x.mean(0) if now else x


def permuted(x, now):
    return x[torch.randperm(len(x))] if now else x


def rolled(x, now):
    return x.roll(int(now), 0)


def exchanged(x, now):
    """The same operators, on another operand."""
    public = torch.ones_like(x)
    return x + (x if now else public).flip(0)


def used(x, now):
    """The same operators, of which one that mixes is not used as a rule."""
    mean, own = x.mean(0).expand_as(x), 0 * x
    return x - (mean if now else own)


def doubled(x, now):
    return 2 * x if now else x


def drawn(x, now):
    return x + torch.randn_like(x) if random.random() < 0.3 else x


def steps(change, piece=None):
    torch.manual_seed(0)
    model = Network(change)
    batch = batch_of(
        torch.randn(9, 6), torch.arange(9) % 3, divisor=9.0, scheme=Poisson(0.5), max_physical=piece
    )
    query = tacit.PerSampleClip(1.0)
    for step in range(STEPS):
        model.schedule["step"] = step
        yield query(model, F.cross_entropy, batch)


@pytest.mark.parametrize("piece", [None, 4])
@pytest.mark.parametrize("change", [centred, permuted, rolled, exchanged, used])
def test_mixing_is_refused_in_the_step_that_mixes(change, piece):
    running = steps(change, piece)
    for _ in range(MIXED):
        next(running)
    with pytest.raises(MixesRecords, match=re.escape("records meet")):
        next(running)


def test_the_same_program_is_planned_once():
    """Numbers that Python hands to operators, and memory that is used again, change nothing."""
    model = Network(lambda x, now: (x * 2.0 + torch.tensor([1.0])).clone())
    query = tacit.PerSampleClip(1.0)
    batch = batch_of(torch.randn(9, 6), torch.arange(9) % 3, divisor=9.0, scheme=Poisson(0.5))
    for _ in range(STEPS):
        query(model, F.cross_entropy, batch)
    (plans,) = query.engine.eager._plans[model].values()
    assert len(plans) == 1


@pytest.mark.parametrize("change", [doubled, drawn])
def test_another_way_that_keeps_records_apart_is_taken(change):
    random.seed(0)
    assert len(list(steps(change))) == STEPS
