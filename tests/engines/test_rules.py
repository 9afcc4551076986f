"""Rules of a user's own for operators and Functions, and what happens where a rule is wrong."""

from __future__ import annotations

import pytest
import torch
from engine_checks import assert_same, batch_for, one_by_one, quadratic, sums_of
from torch import nn

import tacit
from tacit.engines.clipping import RowScale, Stacked
from tacit.engines.rules import RULES
from tacit.errors import UnsupportedModule


class Scaled(torch.autograd.Function):
    """y = x·w per channel, at any number of positions."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w[:, None]

    @staticmethod
    def backward(ctx, b):
        x, w = ctx.saved_tensors
        return b * w[:, None], (b * x).sum((0, 2))


class Scale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, channels))

    def forward(self, x):
        return Scaled.apply(x, self.weight)


@pytest.fixture(autouse=True)
def own_rules():
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 3), Scale(3), nn.Flatten(), nn.Linear(12, 2)).double()


def records():
    return batch_for(torch.randn(6, 2, 6, dtype=torch.float64))


def right(use):
    x, _ = use.node.saved_tensors
    return (use.rows(x) * use.rows(use.cotangent)).sum((1, 3))


@pytest.mark.filterwarnings("error")
def test_a_rule_of_ones_own_gives_the_clipped_sums_of_a_loop():
    calls = []

    @tacit.gradient_rule(Scaled)
    def counted(use):
        calls.append(use.shape)
        return right(use)

    model, batch = network(), records()
    query = tacit.PerSampleClip(0.3, engine=tacit.engines.BookKeeping())
    assert_same(sums_of(query, model, batch), one_by_one(model, batch, 0.3))
    assert set(calls) == {(3,)}


@pytest.mark.filterwarnings("ignore:records of Sequential run one by one")
def test_without_a_rule_each_record_runs_alone():
    model, batch = network(), records()
    assert_same(sums_of(tacit.PerSampleClip(0.3), model, batch), one_by_one(model, batch, 0.3))


def test_a_rule_that_does_not_apply_leaves_the_operator_to_itself():
    tacit.gradient_rule("AddmmBackward0")(lambda use: None)
    model, batch = nn.Linear(4, 3).double(), batch_for(torch.randn(5, 4, dtype=torch.float64))
    assert_same(sums_of(tacit.PerSampleClip(0.3), model, batch), one_by_one(model, batch, 0.3))


def test_where_the_rule_of_a_function_does_not_apply_each_record_runs_alone():
    tacit.gradient_rule(Scaled)(lambda use: None)
    model, batch = network(), records()
    with pytest.warns(UserWarning, match="one by one: the rule of Scaled does not apply"):
        found = sums_of(tacit.PerSampleClip(0.3), model, batch)
    assert_same(found, one_by_one(model, batch, 0.3))


def half_the_gradient(use):
    return right(use) / 2


def the_batchs_mean(use):
    rows = right(use)
    return rows.mean(dim=0).expand_as(rows)


def without_positions(use):
    x, _ = use.node.saved_tensors
    return (use.rows(x) * use.rows(use.cotangent))[:, 0, :, 0]


def norms_too_small(use):
    rows = right(use)
    return Stacked(rows, 0.5 * rows.square().sum(dim=1))


WRONG = [half_the_gradient, the_batchs_mean, without_positions, norms_too_small]


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_a_wrong_rule_is_refused_when_it_is_first_used(rule):
    tacit.gradient_rule(Scaled)(rule)
    model = nn.Sequential(Scale(3), nn.Flatten()).double()
    batch = batch_for(torch.randn(6, 3, 4, dtype=torch.float64))
    with pytest.raises(UnsupportedModule, match="gradient_rule"):
        tacit.PerSampleClip(0.3)(model, quadratic, batch)


def test_what_is_no_operator_is_refused():
    with pytest.raises(TypeError, match="AddmmBackward0"):
        tacit.gradient_rule(nn.Linear)(right)


class Keyed(Stacked):
    """Scales by 0 what should be left out."""

    def total(self, scale):
        return scale.values_B @ self.rows_BP


def test_a_rule_that_keeps_what_is_not_finite_would_be_seen():
    """The planted bug: 0 · NaN. Our own forms leave such rows out."""
    rows, scale = torch.tensor([[1.0], [torch.nan]]), torch.tensor([1.0, 0.0])
    assert Keyed(rows).total(RowScale(scale)).isnan().any()
    assert Stacked(rows).total(RowScale(scale)).tolist() == [1.0]
