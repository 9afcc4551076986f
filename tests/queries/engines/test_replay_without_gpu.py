"""Recorded steps, with a stand-in for the GPU's graph: what is read anew, and what is not.

The stand-in runs the recorded work again and writes over the tensors that it returned first, as a
graph does. Numbers that the work closed over stay as they were, also as in a graph.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tacit
from tacit import BatchClip, LayerFactors, PerSampleClip, Records, Replay, ReplayedSets
from tacit.losses import CrossEntropy
from tacit.queries.engines import replay, scaling_triton
from tacit.queries.mini_sets import SetBySet, replayed_sets

LOSS = CrossEntropy()


class AsIfOnGpu(torch.Tensor):
    is_cuda = True


def tensors_of(clipped):
    return [*clipped.sums.values(), *clipped.counts]


def stand_in(work, warm_ups=2, pool=None):
    found = work()

    def again():
        for old, new in zip(tensors_of(found), tensors_of(work()), strict=True):
            old.copy_(new)

    return SimpleNamespace(replay=again, pool=lambda: None), found


@pytest.fixture
def no_gpu(monkeypatch):
    for module in (replay, replayed_sets):
        monkeypatch.setattr(module, "capture", stand_in)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(scaling_triton, "fits", lambda x_B: False)  # where there is a GPU as well


def batches(size: int, count: int = 5):
    torch.manual_seed(0)
    records = Records(torch.randn(24, 4).double(), torch.randint(0, 2, (24,)), public_size=24)
    sampler = tacit.MiniSetSampler(records, size, count, chosen=12 // size, seed=1)
    for batch in sampler:
        yield dataclasses.replace(batch, indices=batch.indices.as_subclass(AsIfOnGpu))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def public() -> Records:
    torch.manual_seed(2)
    return Records(torch.randn(24, 4).double(), torch.randint(0, 2, (24,)), name="public")


def sums_of(bounded):
    return [s.as_subclass(torch.Tensor) for block in bounded.blocks for s in block.sums]


SETTINGS = {
    "flat": lambda step: (0.1 / (step + 1), None),
    "by-layer": lambda step: ([0.1 / (step + 1), 0.02], tacit.by_layer),
    "factors": lambda step: (LayerFactors(public(), 0.1 / (step + 1)), tacit.by_parameter),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("size", [1, 4])
def test_constants_that_change_are_read_anew(no_gpu, setting, size):
    model, engine = network(), Replay() if size == 1 else ReplayedSets()
    kept = engine._recordings
    for step, batch in enumerate(batches(size)):
        norm, blocks = SETTINGS[setting](step)
        if size == 1:
            recorded = PerSampleClip(norm, blocks=blocks, engine=engine)
            plain = PerSampleClip(norm, blocks=blocks)
        else:
            recorded = BatchClip(norm, size, blocks=blocks, engine=engine)
            plain = BatchClip(norm, size, blocks=blocks, engine=tacit.SetBySet())
        found, expected = recorded(model, LOSS, batch), plain(model, LOSS, batch)
        for a, b in zip(sums_of(found), sums_of(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
    assert len(kept) == 1  # one shape, one recording
    engine.forget()
    assert not engine._recordings


class Half:
    """Half of the entries are frozen; from the second step on, the other half."""

    def __init__(self, model):
        self.masks = {
            n: (torch.arange(p.numel()) % 2 == 0).view_as(p) for n, p in model.named_parameters()
        }

    def active(self, model):
        return self.masks


@pytest.mark.parametrize("size", [1, 4])
def test_masks_that_change_in_place_are_read_anew(no_gpu, size):
    model = network()
    frozen = Half(model)
    engine = Replay() if size == 1 else ReplayedSets()
    for batch in batches(size):
        if size == 1:
            recorded = PerSampleClip(0.1, engine=engine, frozen=frozen)
            plain = PerSampleClip(0.1, frozen=frozen)
        else:
            recorded = BatchClip(0.1, size, engine=engine, frozen=frozen)
            plain = BatchClip(0.1, size, engine=tacit.SetBySet(), frozen=frozen)
        found, expected = recorded(model, LOSS, batch), plain(model, LOSS, batch)
        for a, b in zip(sums_of(found), sums_of(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        for mask in frozen.masks.values():
            mask.logical_not_()


def test_a_number_that_was_recorded_for_good_is_caught(no_gpu, monkeypatch):
    """The mistake that the held constants are there for: the step is clipped to an old C."""
    from tacit.queries.engines.held_constants import HeldConstants

    monkeypatch.setattr(HeldConstants, "follow", lambda self, task: None)
    model, engine = network(), Replay()
    wrong = 0
    for step, batch in enumerate(batches(1)):
        found = PerSampleClip(0.1 / (step + 1), engine=engine)(model, LOSS, batch)
        expected = PerSampleClip(0.1 / (step + 1))(model, LOSS, batch)
        pairs = zip(sums_of(found), sums_of(expected), strict=True)
        wrong += not all(torch.allclose(a, b) for a, b in pairs)
    assert wrong == 4


@pytest.mark.parametrize("engine", [SetBySet, ReplayedSets])
def test_a_set_that_batch_norm_refuses_adds_nothing_recorded_or_not(no_gpu, engine):
    """Else a run would end, or not, by whether one record is there."""
    records = Records(torch.randn(8, 4), torch.arange(8) % 2, public_size=8)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    query = BatchClip(1.0, 2, engine=engine())
    for held in (records, records.without(0)):
        batch = tacit.MiniSetSampler(held, 2, steps=1, rate=1.0, seed=0).next_batch()
        batch = dataclasses.replace(batch, indices=batch.indices.as_subclass(AsIfOnGpu))
        for _ in range(2):
            assert all(sum_.isfinite().all() for sum_ in sums_of(query(model, LOSS, batch)))
