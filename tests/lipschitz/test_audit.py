"""The audit finds the mistakes that it is there for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tacit.errors import UnboundedLayer
from tacit.lipschitz import (
    AddBias,
    BoundedInput,
    Constraint,
    FrobeniusBall,
    MaxMin,
    Parameterless,
    SpectralLinear,
    audit_layer,
    audit_model,
)
from tacit.losses import CrossEntropy, KantorovichRubinstein, WithConstant


class BiasWithoutItsRoot(AddBias):
    def gradient_norms(self, x, cotangent):
        return {"bias": cotangent}


class BiasForgottenInTheOutput(AddBias):
    def output_norm(self, x):
        return x.norm


class CentresOverTheBatch(nn.Module, Parameterless):
    def forward(self, x):
        return x - x.mean(dim=0, keepdim=True)


class AverageOverlap(nn.Module, Parameterless):
    """Divides by the mean number of windows a pixel is in, not by the largest."""

    def forward(self, x):
        windows = x.unfold(-2, 3, 1).unfold(-2, 3, 1)
        overlap = windows.shape[-4] * windows.shape[-3] * 9 / (x.shape[-1] * x.shape[-2])
        return windows.sum(dim=(-2, -1)) / 3 / math.sqrt(overlap)


class HalfAsSteep(MaxMin):
    def lipschitz(self, x):
        return 0.5

    def output_norm(self, x):
        return x.norm


class SteepForwardsOnly(nn.Module, Parameterless):
    """Backwards it looks like the identity."""

    def forward(self, x):
        return x + (2 * x).detach()

    def output_norm(self, x):
        return 3 * x.norm


class NormalisesTheBatch(nn.Module, Parameterless):
    def forward(self, x):
        return x / (1 + x.std(dim=0, keepdim=True, correction=0))


class RemembersTheBatch(nn.Module, Parameterless):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.detach().sum()
        return x


class ClipsTheWholeBatch(nn.Module, Parameterless):
    """Records are apart forwards, and share one clip backwards."""

    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient / gradient.norm().clamp_min(1.0)

    def forward(self, x):
        return self.Clip.apply(x)


class ForgetsWhatZeroBecomes(nn.Module, Parameterless):
    def forward(self, x):
        return torch.sigmoid(x)


class NotANumberAtZero(nn.Module, Parameterless):
    def forward(self, x):
        return x.square().sum(dim=-1, keepdim=True).sqrt()


class DependsOnTheCount(nn.Module, Parameterless):
    def forward(self, x):
        return x / len(x)


class WritesOverItsInput(nn.Module, Parameterless):
    def forward(self, x):
        return x.mul_(2.0) / 2


PLANTED = [
    (BiasWithoutItsRoot(3), (3, 5, 5), "gradient of bias"),
    (BiasForgottenInTheOutput(3), (3, 2, 2), "output norm"),
    (CentresOverTheBatch(), (4,), "outputs of the others"),
    (AverageOverlap(), (1, 10, 10), "Lipschitz constant"),
    (HalfAsSteep(), (4,), "Lipschitz constant"),
    (SteepForwardsOnly(), (4,), "Lipschitz constant"),
    (NormalisesTheBatch(), (4,), "outputs of the others"),
    (RemembersTheBatch(), (4,), "depends on the records"),
    (ClipsTheWholeBatch(), (4,), "records have other cotangents"),
    (ForgetsWhatZeroBecomes(), (9,), "output norm"),
    (NotANumberAtZero(), (4,), "Lipschitz constant"),
    (NotANumberAtZero(), (4,), "not finite"),
    (DependsOnTheCount(), (4,), "records have other outputs"),
    (WritesOverItsInput(), (4,), "over its input"),
]


@pytest.mark.parametrize(("layer", "shape", "words"), PLANTED, ids=lambda v: type(v).__name__)
def test_a_planted_fault_is_found(layer, shape, words):
    report = audit_layer(layer, shape)
    assert not report.passed
    assert any(words in violation for violation in report.violations), str(report)
    with pytest.raises(UnboundedLayer, match="breaks its own bounds"):
        report.require()


def test_a_fault_deep_inside_a_network_is_found():
    model = nn.Sequential(SpectralLinear(8, 8), MaxMin(), nn.Unflatten(1, (2, 4)))
    model.append(BiasWithoutItsRoot(2)).append(nn.Flatten()).append(SpectralLinear(8, 3))
    report = audit_layer(model, (8,), steps=30, restarts=1)
    assert [f.what for f in report.findings if not f.holds] == ["gradient of 3.bias"]


def test_the_layer_itself_is_left_alone():
    layer = AddBias(3)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    report = audit_layer(layer, (3, 2))
    assert torch.equal(torch.rand(2), expected)
    assert layer.bias.dtype is torch.float32
    assert not layer.bias.any()
    assert layer.bias.grad is None
    assert report.require() is report
    assert "passed" in str(report)


class Square(nn.Module):
    """x², number by number: X² long and 2X steep, both where one number has all of X."""

    def forward(self, x):
        return x.square()

    def output_norm(self, x):
        return x.norm**2

    def lipschitz(self, x):
        return 2 * x.norm

    def gradient_norms(self, x, cotangent):
        return {}


@pytest.mark.parametrize("norm", [0.1, 3.0])
def test_bounds_that_depend_on_the_input_are_asked_for_that_input(norm):
    report = audit_layer(Square(), (4,), input_norm=norm)
    assert report.passed, str(report)
    assert min(f.tightness for f in report.findings) > 0.999


def test_a_layer_that_claims_nothing_is_refused():
    with pytest.raises(UnboundedLayer, match="SpectralLinear"):
        audit_layer(nn.Linear(3, 3), (3,))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        BoundedInput(1.0), nn.Flatten(), SpectralLinear(8, 8, bias=True), MaxMin(),
        SpectralLinear(8, 3),
    )  # fmt: skip


CLASSES = torch.arange(3)


@pytest.mark.parametrize("loss", [CrossEntropy(0.1), KantorovichRubinstein()], ids=repr)
def test_a_sound_model_passes(loss):
    report = audit_model(network(), loss, (2, 4), CLASSES, steps=20, rows=4)
    assert report.passed, str(report)
    assert report.tightness("loss constant") > 0.9
    assert report.tightness("gradient of 4.weight") > 0.9


def kantorovich_rubinstein_by_counts(outputs, targets):
    """As published: each class's mean over the batch's own members."""
    is_class = torch.nn.functional.one_hot(targets, outputs.shape[1]).bool()
    inside = (outputs * is_class).sum(0) / is_class.sum(0).clamp_min(1)
    outside = (outputs * ~is_class).sum(0) / (~is_class).sum(0).clamp_min(1)
    return (outside - inside).sum()


def test_a_loss_of_the_batch_is_found():
    loss = WithConstant(kantorovich_rubinstein_by_counts, math.sqrt(3))
    report = audit_model(network(), loss, (2, 4), CLASSES, steps=20, rows=4)
    assert any("neither the mean nor the sum" in v for v in report.violations), str(report)


def test_a_loss_constant_that_is_too_small_is_found():
    loss = WithConstant(CrossEntropy(0.1), 1.0)
    report = audit_model(network(), loss, (2, 4), CLASSES, steps=20, rows=4)
    assert not report.findings[0].holds
    assert not next(f for f in report.findings if f.what == "gradient of 4.weight").holds


class WrongInput(nn.Module, Parameterless):
    """Says that it bounds the input, and does not."""

    def forward(self, x):
        return x

    def output_norm(self, x):
        return 1.0


def test_an_input_that_is_not_bounded_is_found():
    model = network()
    model[0] = WrongInput()
    assert not audit_model(model, CrossEntropy(), (2, 4), CLASSES, steps=20, rows=4).passed


def test_a_batch_normalisation_in_disguise_is_found():
    model = network()
    model[3] = NormalisesTheBatch()
    report = audit_model(model, CrossEntropy(), (2, 4), CLASSES, steps=20, rows=4)
    assert any("changes the outputs of the others" in v for v in report.violations)


class LooksAtTheCount(nn.Module, Parameterless):
    """Itself for two records and loud for three."""

    def __init__(self, at=3):
        super().__init__()
        self.at = at

    def forward(self, x):
        return 9 * x if len(x) == self.at else x


@pytest.mark.parametrize("at", [1, 2, 3, 7])
def test_a_forward_that_looks_at_the_number_of_records_is_found(at):
    violations = " ".join(audit_layer(LooksAtTheCount(at), (4,), steps=4).violations)
    assert "records have other outputs" in violations or "record changes the outputs" in violations


class LooksInItsGradient(nn.Module):
    """Its outputs are the same for any number of records; its parameter's gradient is not."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        bias = self.bias if len(x) != 3 else 9 * self.bias - 8 * self.bias.detach()
        return x + bias

    def constraints(self):
        return [Constraint(self.bias, FrobeniusBall(1.0))]

    def output_norm(self, x):
        return x.norm + 1.001

    def lipschitz(self, x):
        return 1.0

    def gradient_norms(self, x, cotangent):
        return {"bias": cotangent}


def test_gradients_are_compared_at_each_number_of_records():
    report = audit_layer(LooksInItsGradient(), (4,), steps=4)
    assert "the gradient of 3 records is not the sum of their gradients" in report.violations


class Departs(nn.Module):
    """Traced as the identity, and loud for three records."""

    def forward(self, x):
        return 9 * x if isinstance(x, torch.Tensor) and len(x) == 3 else 1.0 * x


def test_a_module_that_is_not_its_program_is_found():
    report = audit_layer(Departs(), (4,), steps=4)
    assert "for 3 records its forward is not the program that is bounded" in report.violations
    assert not any("for 7 records its forward" in v for v in report.violations)


def test_random_draws_of_a_model_leave_the_caller_s_generator_alone():
    model = network().insert(2, nn.Dropout(0.5))
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    audit_layer(model, (2, 4), input_norm=1.0, steps=2, restarts=1)
    audit_model(model, CrossEntropy(), (2, 4), CLASSES, steps=2, rows=4, restarts=1)
    assert torch.equal(torch.rand(2), expected)
