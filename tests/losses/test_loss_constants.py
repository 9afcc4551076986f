"""Constants of losses, attacked by gradient ascent over outputs and targets.

All are tight: the attack comes within a twentieth of every one of them.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from loss_cases import CASES, IDS, REGRESSION, outputs_for, targets_for
from torch.func import grad, vmap

from tacit.losses import (
    BinaryCrossEntropy,
    CosineSimilarity,
    CrossEntropy,
    HingeKantorovichRubinstein,
    Huber,
    MeanSquaredError,
    MulticlassHinge,
    MultiLabelCrossEntropy,
    ScaledCrossEntropy,
    WithConstant,
    attack_constant,
    largest_gradient,
)

torch.set_num_threads(1)


def gradients(loss, outputs, targets):
    """∇_h ℓ(h, y) of each record in a batch of its own."""

    def of_one(h, y):
        return loss(h.unsqueeze(0), y.unsqueeze(0))

    return vmap(grad(of_one))(outputs, targets)


@pytest.mark.parametrize(("loss", "num_outputs"), CASES, ids=IDS)
def test_ascent_never_passes_the_constant_and_comes_near_it(loss, num_outputs):
    tried = targets_for(loss, num_outputs, 40) if isinstance(loss, REGRESSION) else None
    assert 0.95 <= attack_constant(loss, num_outputs, targets=tried, steps=60) <= 1 + 1e-9


@pytest.mark.parametrize(("loss", "num_outputs"), CASES, ids=IDS)
def test_a_constant_a_little_too_small_is_noticed(loss, num_outputs):
    tried = targets_for(loss, num_outputs, 40) if isinstance(loss, REGRESSION) else None
    small = WithConstant(loss, 0.94 * loss.lipschitz_for(num_outputs))
    with pytest.raises(ValueError, match="give a constant of at least that"):
        attack_constant(small, num_outputs, targets=tried, steps=40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 1e4])
@pytest.mark.parametrize(("loss", "num_outputs"), CASES, ids=IDS)
def test_finite_and_within_the_constant_at_every_size(loss, num_outputs, size, dtype):
    outputs = outputs_for(num_outputs, 60, size).to(dtype)
    outputs[::2] = size * outputs[::2].sign()
    targets = targets_for(loss, num_outputs, 60)
    targets = targets.to(dtype) if targets.is_floating_point() else targets
    assert loss.per_record(outputs, targets).isfinite().all()
    found = gradients(loss, outputs, targets)
    assert found.dtype == dtype
    assert found.isfinite().all()
    rounding = 1 + 20 * torch.finfo(dtype).eps
    assert (found.norm(dim=1) <= loss.lipschitz_for(num_outputs) * rounding).all()


def test_soft_labels_keep_the_constant():
    """Ascent over the outputs, with targets that are distributions, corners among them."""
    torch.manual_seed(0)
    soft = torch.cat([torch.eye(5), torch.rand(40, 5).softmax(dim=1), torch.full((1, 5), 0.2)])
    for loss in (CrossEntropy(0.3), CrossEntropy(0.3, smoothing=0.2), ScaledCrossEntropy(0.3)):
        assert 0.95 <= attack_constant(loss, 5, targets=soft.double()) <= 1 + 1e-9


def test_targets_that_are_no_distribution_cannot_break_the_constant():
    """The targets of a record are its own to choose: F.cross_entropy alone would believe them."""
    rows = [[1e9, 0, 0], [-5.0, 3, 3], [7, 7, 7], [0, 0, 0], [math.inf, 1, 0], [math.nan, 0, 1]]
    wild = torch.tensor([*rows, [3e38] * 3, [-1.0, -1, -1]], dtype=torch.float64)
    assert largest_gradient(F.cross_entropy, 3, targets=wild[:1]) > 1e8
    assert attack_constant(CrossEntropy(), 3, targets=wild) <= 1 + 1e-9


def test_a_label_outside_the_classes_cannot_break_the_constant():
    wild = torch.tensor([-1, 10, 99, -100])
    for loss, num_outputs in CASES:
        if isinstance(loss, (*REGRESSION, CrossEntropy, ScaledCrossEntropy)):
            continue  # cross-entropy refuses such labels
        several = isinstance(loss, MultiLabelCrossEntropy)  # one number per label
        targets = wild[:, None].expand(-1, num_outputs) if several else wild
        attack_constant(loss, num_outputs, targets=targets, steps=20)


def test_constants_by_hand():
    assert CrossEntropy().lipschitz_for(10) == CrossEntropy().lipschitz == math.sqrt(2)
    assert ScaledCrossEntropy(0.01).lipschitz_for(10) == math.sqrt(2)
    assert CrossEntropy(0.5, smoothing=1.0).lipschitz_for(4) == pytest.approx(2 * math.sqrt(0.75))
    assert BinaryCrossEntropy(0.25).lipschitz_for(1) == 4
    assert MulticlassHinge().lipschitz_for(100) == 0.1
    assert HingeKantorovichRubinstein(10.0).lipschitz_for(1) == 11
    smooth = CrossEntropy(smoothing=0.1)
    assert smooth.lipschitz_for(10) < smooth.lipschitz_for(1000) < smooth.lipschitz


def test_the_attack_finds_what_has_no_constant():
    def norm(outputs, targets):
        return outputs.square().sum(dim=1).mean()

    with pytest.raises(ValueError, match="gradient of norm"):
        attack_constant(WithConstant(norm, 10.0), 3)
    assert not hasattr(MeanSquaredError(), "lipschitz_for")
    assert not hasattr(MeanSquaredError(), "lipschitz")
    assert largest_gradient(MeanSquaredError(), 2, targets=torch.zeros(1, 2)) > 1e4


def test_the_attack_does_not_take_nan_for_an_answer():
    def broken(outputs, targets):
        return (
            outputs / outputs.norm(dim=1, keepdim=True).clamp_min(1e9).log().sub(99).sqrt()
        ).sum()

    with pytest.raises(ValueError, match="norm nan"):
        attack_constant(WithConstant(broken, 1e9), 3)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_setting_without_a_constant_is_refused(value):
    for kind in (CrossEntropy, ScaledCrossEntropy, BinaryCrossEntropy, MulticlassHinge):
        with pytest.raises(ValueError, match="give a number above 0"):
            kind(value)
    for kind in (CosineSimilarity, Huber, HingeKantorovichRubinstein):
        with pytest.raises(ValueError, match="give a number above 0"):
            kind(value)
    with pytest.raises(ValueError, match="lipschitz"):
        WithConstant(F.cross_entropy, value)
    with pytest.raises(ValueError, match="between 0 and 1"):
        CrossEntropy(smoothing=value - 1)
