"""Rules of a user's own, and `check_gradient_rule`, which must catch rules that are wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from engine_checks import batch_for, one_by_one, sums_of
from torch import nn

import tacit
from tacit.errors import UnsupportedModule
from tacit.queries.engines.rows import Stacked
from tacit.queries.engines.rules import RULES


class Scale(nn.Module):
    """y = x·w per channel, at any number of positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, channels))

    def forward(self, x):
        return x * self.weight[:, None]


class Other(Scale):
    """A subclass: rules are by exact class."""


@pytest.fixture(autouse=True)
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dict(RULES)
    yield
    RULES.clear()
    RULES.update(table)


def right(module, wanted, inputs, cotangent):
    return {"weight": (inputs * cotangent).sum(dim=2)}


def test_a_rule_of_ones_own_gives_the_clipped_sums_of_a_loop():
    tacit.register_gradient_rule(Scale)(right)
    found = tacit.check_gradient_rule(Scale(3), torch.randn(5, 3, 4))
    assert found.errors["weight"] < 1e-12
    assert found.norm_ratios["weight"] == pytest.approx(1.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 3), Scale(3), nn.Flatten(), nn.Linear(12, 2)).double()
    batch = batch_for(torch.randn(6, 2, 6, dtype=torch.float64))
    query = tacit.PerSampleClip(0.3, engine=tacit.BookKeeping())
    expected = one_by_one(model, batch, 0.3)
    for name, total in sums_of(query, model, batch).items():
        torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-9)
    assert Other not in RULES


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Linear(5, 3), torch.randn(4, 5)),
        (nn.Linear(5, 3), torch.randn(4, 7, 5)),
        (nn.Conv1d(2, 3, 3, padding=1), torch.randn(3, 2, 6)),
        (nn.Conv2d(2, 4, 3, stride=2, groups=2), torch.randn(3, 2, 7, 7)),
        (nn.ConvTranspose2d(2, 3, 3), torch.randn(3, 2, 4, 4)),
        (nn.GroupNorm(2, 4), torch.randn(3, 4, 5)),
        (nn.LayerNorm(6), torch.randn(3, 2, 6)),
        (nn.RMSNorm(6), torch.randn(3, 2, 6)),
        (nn.InstanceNorm2d(3, affine=True), torch.randn(3, 3, 4, 4)),
        (nn.BatchNorm1d(3).eval(), torch.randn(4, 3)),
        (nn.Embedding(9, 4, padding_idx=0), torch.randint(0, 9, (5, 6))),
        (tacit.lipschitz.SpectralLinear(5, 3), torch.randn(4, 5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_our_own_rules_agree_with_autograd(module, inputs):
    found = tacit.check_gradient_rule(module, inputs)
    assert max(found.norm_ratios.values()) < 1.001


def half_the_gradient(module, wanted, inputs, cotangent):
    return {"weight": right(module, wanted, inputs, cotangent)["weight"] / 2}


def the_batchs_mean(module, wanted, inputs, cotangent):
    rows = right(module, wanted, inputs, cotangent)["weight"]
    return {"weight": rows.mean(dim=0).expand_as(rows)}


def without_positions(module, wanted, inputs, cotangent):
    return {"weight": (inputs * cotangent)[:, :, 0]}


def one_sum(module, wanted, inputs, cotangent):
    return {"weight": right(module, wanted, inputs, cotangent)["weight"].sum(dim=0)}


def another_name(module, wanted, inputs, cotangent):
    return {"scale": right(module, wanted, inputs, cotangent)["weight"]}


def writes_the_weights(module, wanted, inputs, cotangent):
    found = right(module, wanted, inputs, cotangent)
    module.weight.mul_(1.5)
    return found


def norms_too_small(module, wanted, inputs, cotangent):
    rows = right(module, wanted, inputs, cotangent)["weight"]
    return {"weight": Stacked(rows, 0.9 * rows.square().sum(dim=1))}


@dataclass
class AddsEverybody(Stacked):
    """Scales by 0 what should be left out."""

    def total(self, scale_B):
        return scale_B @ self.rows_BP


def keeps_what_is_not_finite(module, wanted, inputs, cotangent):
    return {"weight": AddsEverybody(right(module, wanted, inputs, cotangent)["weight"])}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (half_the_gradient, "off by 0.5"),
        (the_batchs_mean, "off by"),
        (without_positions, "off by"),
        (one_sum, "rows of shape"),
        (another_name, "answers"),
        (writes_the_weights, "changes the module"),
        (norms_too_small, "from above"),
        (keeps_what_is_not_finite, "not finite reaches the sum"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_rule_is_caught(rule, words):
    tacit.register_gradient_rule(Scale)(rule)
    with pytest.raises(ValueError, match=words):
        tacit.check_gradient_rule(Scale(3), torch.randn(5, 3, 4))


def test_what_cannot_be_registered_is_named():
    with pytest.raises(ValueError, match="has the rule"):
        tacit.register_gradient_rule(nn.Linear)(right)
    with pytest.raises(TypeError, match="module classes"):
        tacit.register_gradient_rule(Scale(3))
    with pytest.raises(UnsupportedModule, match="register_gradient_rule"):
        tacit.check_gradient_rule(Other(3), torch.randn(2, 3, 4))
