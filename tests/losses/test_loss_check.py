"""Losses by name, and `check_loss`, which must catch losses that break the contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from loss_cases import CASES, IDS
from torch import nn

import tacit
from tacit.losses import (
    CrossEntropy,
    LipschitzLoss,
    RecordLoss,
    TailoredLoss,
    Task,
    WithConstant,
    loss_named,
    registered_losses,
)
from tacit.losses.registry import numbers_of


@pytest.mark.parametrize(("loss", "num_outputs"), CASES, ids=IDS)
def test_our_own_losses_keep_the_contract(loss, num_outputs):
    found = tacit.losses.check_loss(loss, num_outputs, steps=10)
    assert 0.5 < found.share <= 1 + 1e-9


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), F.cross_entropy, TailoredLoss(2.0, None, 2.0)]
)
def test_losses_without_a_constant_keep_it_too(loss):
    assert tacit.losses.check_loss(loss, 5).task is Task.CLASSIFICATION


def made(name):
    """The loss of this name, with ones for the numbers that it needs."""
    needed = [number for number, has_default in numbers_of(name).items() if not has_default]
    return loss_named(name, **dict.fromkeys(needed, 1.0))


def test_every_concrete_loss_of_ours_has_a_name():
    terms = {"PreActivationPenalty", "WeightedSum", "LipschitzSum", "WithConstant"}
    kinds = {getattr(tacit.losses, name) for name in tacit.losses.__all__}
    ours = {k for k in kinds if isinstance(k, type) and issubclass(k, RecordLoss)}
    named = {type(made(name)) for name in registered_losses()} | {RecordLoss, LipschitzLoss}
    assert {kind.__name__ for kind in ours - named} <= terms
    assert loss_named("focal", gamma=5.0) == tacit.losses.Focal(5.0)


@dataclass(frozen=True)
class ByClassCounts(LipschitzLoss):
    """The published Kantorovich–Rubinstein loss, divided by the batch's class counts."""

    task: ClassVar[Task | None] = Task.CLASSIFICATION

    def lipschitz_for(self, num_outputs):
        return 1.0

    def per_record(self, outputs, targets):
        counts = (targets[:, None] == targets).sum(dim=1)
        return -outputs.gather(1, targets[:, None]).squeeze(1) / counts


class ByGradientAlone(RecordLoss):
    """Its values are those of each record; its gradients carry the batch's mean."""

    def per_record(self, outputs, targets):
        extra = outputs.sum(dim=1) - outputs.sum(dim=1).detach()
        return CrossEntropy().per_record(outputs, targets) + extra * outputs.detach().mean()


class Remembers(RecordLoss):
    calls = 0

    def per_record(self, outputs, targets):
        self.calls += 1
        return self.calls * CrossEntropy().per_record(outputs, targets)


def centred_by_the_batch(outputs, targets):
    return F.cross_entropy(outputs - outputs.mean(dim=0), targets)


def with_a_slope_that_is_infinite(outputs, targets):
    return outputs.square().sum(dim=1).sqrt().mean()


def with_a_number_per_class(outputs, targets):
    return outputs.square()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (ByClassCounts(), "depends on other records"),
        (ByGradientAlone(), "gradient depends on other records"),
        (Remembers(), "keep nothing|depends on other records"),
        (centred_by_the_batch, "depends on other records"),
        (with_a_slope_that_is_infinite, "not finite"),
        (with_a_number_per_class, "one number per record"),
        (WithConstant(F.cross_entropy, 1.4), "constant of at least"),
        (WithConstant(CrossEntropy(0.1), 14.0), "constant of at least"),
        (TailoredLoss(2.0, 11.0, 2.0), "pre-activations"),
    ],
)
def test_a_broken_contract_is_noticed(loss, words):
    with pytest.raises(ValueError, match=words):
        tacit.losses.check_loss(loss, 4, steps=40)


def test_positions_and_real_targets_are_tried():
    @tacit.register_loss("each-position", task="tokens", lipschitz=2**0.5)
    def each_position(outputs, targets):
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    found = tacit.losses.check_loss(each_position, 4)
    assert found.task is Task.TOKENS
    assert 0.5 < found.share < 0.6  # a mean over three positions: 1/√3 of the constant

    @tacit.register_loss("summed-positions", task="tokens", lipschitz=2**0.5)
    def summed_positions(outputs, targets):
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")

    with pytest.raises(ValueError, match="constant of at least"):
        tacit.losses.check_loss(summed_positions, 4)


def test_a_name_is_given_once_and_with_a_task():
    with pytest.raises(ValueError, match="belongs to"):
        tacit.register_loss("focal")(ByClassCounts)
    with pytest.raises(TypeError, match="does not say its task"):
        tacit.register_loss("remembers")(Remembers)
    with pytest.raises(ValueError, match="lower-case"):
        tacit.register_loss("My Loss")
    tacit.register_loss("counts")(ByClassCounts)
    tacit.register_loss("counts")(ByClassCounts)  # a cell of a notebook that runs again
    assert "counts" in registered_losses()


def test_a_registered_function_trains_clipless_with_its_constant():
    @tacit.register_loss("capped", task="classification", lipschitz=2**0.5)
    def capped(outputs, targets):
        return F.cross_entropy(outputs, targets)

    model = tacit.models.lipschitz_mlp((4,), 3)
    bounds = tacit.lipschitz.propagate(model, capped, (4,))
    assert bounds.total() == pytest.approx(
        tacit.lipschitz.propagate(model, CrossEntropy(), (4,)).total()
    )
    records = tacit.Records(torch.randn(9, 4), torch.arange(9) % 3)
    assert tacit.evaluate(model, records, capped).accuracy is not None
