"""Rules: each equals a loop over records, and none can take a record past the bound."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from clip_loop import assert_equal_to_loop, clip, loop, normalise
from torch import nn

import tacit
from tacit import AdaptiveNorm, Normalise, PerSampleClip
from tacit.engines import Automatic, BookKeeping, PerRecord
from tacit.queries import Clip, per_sample_clip
from tacit.sampling import Poisson, batch_of

torch.set_num_threads(1)

RULES = {
    "clip": (Clip(), clip),
    "normalise": (Normalise(), normalise(0.01)),
    "normalise, strongly": (Normalise(3.0), normalise(3.0)),
    "normalise, without stability": (Normalise(0.0), normalise(0.0)),
}
ENGINES = {"book-keeping": BookKeeping, "per-record": PerRecord, "automatic": Automatic}
GROUPINGS = {"flat": None, "layer": tacit.by_layer, "parameter": tacit.by_parameter}


def setting(count, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    inputs = 2 * torch.randn(count, 4, dtype=torch.float64)
    targets = torch.randint(0, 3, (count,))
    return model, batch_of(inputs, targets, divisor=5.0, scheme=Poisson(0.5), max_physical=4)


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_what_a_loop_does(rule, engine, grouping, count):
    model, batch = setting(count)
    ours, theirs = RULES[rule]
    blocks = GROUPINGS[grouping]
    loss = nn.CrossEntropyLoss()
    for max_norm in (0.3, 30.0):
        query = PerSampleClip(
            AdaptiveNorm(max_norm), rule=ours, blocks=blocks, engine=ENGINES[engine]()
        )
        bounded = query(model, loss, batch)
        norms = [max_norm] * len(bounded.blocks)
        assert_equal_to_loop(bounded, *loop(model, loss, batch, norms, blocks, theirs))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", RULES)
def test_padding_and_records_that_are_not_finite_count_for_nothing(rule, engine):
    model, batch = setting(9)
    batch.records.inputs[3] = torch.nan
    batch = batch.with_mask(torch.arange(9) < 6)
    ours, theirs = RULES[rule]
    query = PerSampleClip(AdaptiveNorm(0.5), rule=ours, engine=ENGINES[engine]())
    bounded = query(model, nn.CrossEntropyLoss(), batch)
    assert_equal_to_loop(bounded, *loop(model, nn.CrossEntropyLoss(), batch, [0.5], scale=theirs))


class Dot(nn.Module):
    """⟨w, x⟩: a record's gradient is the record itself."""

    def __init__(self, size, dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x):
        return x @ self.w


def clipped(gradients, max_norm, rule, engine=None):
    model = Dot(gradients.shape[1], gradients.dtype)
    batch = batch_of(gradients, torch.zeros(len(gradients)), divisor=1.0, scheme=Poisson(0.5))
    query = PerSampleClip(max_norm, rule=rule, engine=engine)
    (block,) = query(model, lambda outputs, targets: outputs.sum(), batch).blocks
    return block.sums[0].double()


def exact_norm(vector) -> np.longdouble:
    return np.sqrt(np.square(vector.numpy().astype(np.longdouble)).sum())


@dataclass(frozen=True)
class Enlarges:
    """Not a rule at all: every gradient as long as it is let be."""

    def __call__(self, norms_B, max_norm):
        return torch.full_like(norms_B, 1e30)


EVERY_RULE = [*(rule for rule, _ in RULES.values()), Normalise(1e-30), Enlarges()]


@pytest.mark.parametrize("engine", [BookKeeping(), PerRecord()], ids=["book", "record"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
def test_no_rule_takes_a_record_past_the_bound_by_a_rounding(rule, dtype, engine, monkeypatch):
    # The model is checked by the other tests here; it is a new one for each of these values.
    monkeypatch.setattr(per_sample_clip, "check_model", lambda *args, **kwargs: True)
    torch.manual_seed(0)
    for max_norm in (1e-12, 0.3, 7.0):
        for size in (1, 1000):
            for value in (1e-22, 1e-19, 1e-10, 0.1, 0.7, 1.1, 1e10):
                gradient = torch.full((1, size), value, dtype=dtype)
                assert exact_norm(clipped(gradient, max_norm, rule, engine)) <= max_norm
            gradient = torch.randn(1, size, dtype=dtype)
            assert exact_norm(clipped(gradient, max_norm, rule, engine)) <= max_norm


@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
def test_squares_that_vanish_do_not_hide_a_gradient(rule):
    """One entry whose square is just seen, and a million that are not: 300 times its norm."""
    gradient = torch.full((1, 1_000_000), 2e-23)
    gradient[0, 0] = 6e-23
    assert exact_norm(gradient[0]) > 300 * float(gradient.square().sum().sqrt()) > 0
    assert exact_norm(clipped(gradient, 1e-3, rule)) <= 1e-3


@pytest.mark.parametrize("engine", [BookKeeping(), PerRecord()], ids=["book", "record"])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e36])
@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
def test_a_zero_gradient_stays_zero(rule, max_norm, engine):
    assert torch.equal(clipped(torch.zeros(3, 5), max_norm, rule, engine), torch.zeros(5).double())


def test_normalising_forgets_sizes_and_keeps_directions():
    gradients = torch.tensor([[3e-4, 4e-4]], dtype=torch.float64)
    for scale in (1.0, 1e3, 1e6):
        total = clipped(scale * gradients, 2.0, Normalise(0.0))
        torch.testing.assert_close(total, torch.tensor([1.2, 1.6]).double(), rtol=1e-6, atol=0)
    short = clipped(gradients, 2.0, Normalise(1.0)).norm()
    assert float(short) == pytest.approx(2.0 * 5e-4 / (1 + 5e-4))


@pytest.mark.parametrize("stability", [-1.0, float("nan"), float("inf")])
def test_a_stability_that_makes_no_sense_is_refused(stability):
    with pytest.raises(ValueError, match="stability"):
        Normalise(stability)


def test_rules_are_compared_by_value():
    assert Normalise(0.5) == Normalise(0.5)
    assert len({Clip(), Clip(), Normalise(), Normalise(0.1)}) == 3
    assert dataclasses.replace(Normalise(), stability=0.1) == Normalise(0.1)


WRONG = ["12", True, [], ["1"], [1.0, False], lambda step: 1.0, 0.0, -1, math.nan]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_constant_that_is_no_number_is_refused_with_what_to_give(wrong):
    with pytest.raises(ValueError, match="LayerwiseNorms"):
        PerSampleClip(wrong)
