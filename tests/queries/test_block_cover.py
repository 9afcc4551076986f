"""Blocks hold every trainable parameter exactly once: what is left out would have no bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tacit
from tacit import PerSampleClip
from tacit.sampling import Poisson, batch_of


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2))


def run(model, **how):
    batch = batch_of(torch.randn(5, 3), torch.zeros(5).long(), divisor=1.0, scheme=Poisson(0.5))
    return PerSampleClip(how.pop("max_norm", 1.0), **how)(model, nn.CrossEntropyLoss(), batch)


def names(bounded):
    return [block.names for block in bounded.blocks]


def test_groupings(model):
    assert len(names(run(model))) == 1
    layers = [("0.weight", "0.bias"), ("2.weight", "2.bias"), ("3.weight", "3.bias")]
    assert names(run(model, blocks=tacit.by_layer)) == layers
    assert names(run(model, blocks=tacit.by_parameter)) == [(n,) for pair in layers for n in pair]
    groups = tacit.by_prefix(model, {"body": ["0", "2"], "head": ["3"]})
    assert names(run(model, blocks=groups)) == [(*layers[0], *layers[1]), layers[2]]


@pytest.mark.parametrize(
    "blocks",
    [
        (("0.weight", "0.bias"),),
        (("0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias", "4.weight"),),
        (("0.weight", "0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"),),
    ],
    ids=["left out", "unknown", "twice"],
)
def test_a_wrong_cover_is_refused(model, blocks):
    with pytest.raises(ValueError, match="exactly once"):
        run(model, blocks=blocks)


def test_a_prefix_is_a_module_and_not_the_beginning_of_a_word(model):
    wide = nn.ModuleDict({"fc": nn.Linear(2, 2), "fc2": nn.Linear(2, 2)})
    blocks = tacit.by_prefix(wide, {"first": ["fc"], "second": ["fc2"]})
    assert blocks == (("fc.weight", "fc.bias"), ("fc2.weight", "fc2.bias"))


def test_a_parameter_in_two_groups_is_refused(model):
    with pytest.raises(ValueError, match="in both"):
        tacit.by_prefix(model, {"a": ["0", "2"], "b": ["2", "3"]})


def test_frozen_parameters_are_in_no_block_and_get_no_gradient(model):
    model[0].requires_grad_(False)
    held = [name for block in names(run(model)) for name in block]
    assert held == ["2.weight", "2.bias", "3.weight", "3.bias"]


@pytest.mark.parametrize("max_norm", [[1.0], [1.0, 2.0, 3.0, 4.0]])
def test_one_norm_a_block(model, max_norm):
    with pytest.raises(ValueError, match="one per block"):
        run(model, max_norm=max_norm, blocks=tacit.by_layer)


@pytest.mark.parametrize(
    "max_norm", [0.0, -1.0, float("inf"), float("nan"), [], [1.0, 0.0], [float("nan")]]
)
def test_a_norm_that_bounds_nothing_is_refused(max_norm):
    with pytest.raises(ValueError, match="max_norm"):
        PerSampleClip(max_norm)
