"""Losses are means over records, with the gradients that their formulas have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from loss_cases import CASES, IDS, outputs_for, targets_for
from torch.func import vmap

import tacit
from tacit import losses
from tacit.losses import (
    BinaryCrossEntropy,
    CosineSimilarity,
    CrossEntropy,
    HingeKantorovichRubinstein,
    Huber,
    KantorovichRubinstein,
    MeanAbsoluteError,
    MeanSquaredError,
    MulticlassHinge,
    ScaledCrossEntropy,
    WithConstant,
)
from tacit.losses.record_loss import losses_of

torch.set_num_threads(1)


@pytest.mark.parametrize(("loss", "num_outputs"), CASES, ids=IDS)
def test_gradients_are_those_of_finite_differences(loss, num_outputs):
    outputs = outputs_for(num_outputs, 30, size=0.7)
    targets = targets_for(loss, num_outputs, 30)
    leaf = outputs.clone().requires_grad_(True)
    (found,) = torch.autograd.grad(loss(leaf, targets), leaf)
    step = 1e-6
    numeric = torch.zeros_like(outputs)
    for k in range(num_outputs):
        up, down = outputs.clone(), outputs.clone()
        up[:, k] += step
        down[:, k] -= step
        gap = loss.per_record(up, targets) - loss.per_record(down, targets)
        numeric[:, k] = gap / (2 * step) / len(outputs)
    torch.testing.assert_close(found, numeric, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("loss", "num_outputs"), CASES, ids=IDS)
def test_a_batch_gives_the_mean_of_its_records_alone(loss, num_outputs):
    outputs, targets = outputs_for(num_outputs, 17), targets_for(loss, num_outputs, 17)
    alone = [loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(17)]
    torch.testing.assert_close(loss(outputs, targets), torch.stack(alone).mean())
    each = loss.per_record(outputs, targets)
    assert each.shape == (17,)
    torch.testing.assert_close(each, torch.stack(alone), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("loss", "num_outputs"), CASES, ids=IDS)
def test_the_unreduced_form_has_the_numbers_of_vmap(loss, num_outputs, dtype):
    outputs = outputs_for(num_outputs, 40, size=3.0).to(dtype)
    targets = targets_for(loss, num_outputs, 40)
    targets = targets.to(dtype) if targets.is_floating_point() else targets

    def of_one(h, y):
        return loss(h.unsqueeze(0), y.unsqueeze(0))

    expected = vmap(of_one)(outputs, targets)
    torch.testing.assert_close(losses_of(loss, outputs, targets), expected, rtol=0, atol=0)
    declared = WithConstant(loss, 1e9)
    torch.testing.assert_close(losses_of(declared, outputs, targets), expected, rtol=0, atol=0)


def test_a_subclass_is_not_trusted_with_the_whole_batch():
    class Mixing(CrossEntropy):
        def per_record(self, outputs, targets):
            return super().per_record(outputs - outputs.mean(dim=0), targets)

    outputs, targets = outputs_for(4, 8), torch.arange(8) % 4
    found = losses_of(Mixing(), outputs, targets)
    torch.testing.assert_close(found, torch.full_like(found, 4.0).log())


def test_known_values():
    outputs = outputs_for(5, 12, size=2.0)
    targets = torch.arange(12) % 5
    torch.testing.assert_close(
        CrossEntropy(0.5, smoothing=0.2)(outputs, targets),
        F.cross_entropy(outputs / 0.5, targets, label_smoothing=0.2),
    )
    torch.testing.assert_close(
        ScaledCrossEntropy(0.5)(outputs, targets), 0.5 * F.cross_entropy(outputs / 0.5, targets)
    )
    soft = torch.rand(12, 5, dtype=torch.float64).softmax(dim=1)
    torch.testing.assert_close(CrossEntropy()(outputs, soft), F.cross_entropy(outputs, soft))
    h = torch.tensor([[0.2, -3.0, 0.1]])
    y = torch.tensor([0])
    assert MulticlassHinge(1.0)(h, y).item() == pytest.approx((0.3 + 0 + 0.6) / 3)
    assert KantorovichRubinstein()(h, y).item() == pytest.approx(-0.2 + (-3.0 + 0.1) / 2)
    assert CosineSimilarity(0.1)(h, y).item() == pytest.approx(-0.2 / h.norm().item())
    assert CosineSimilarity(10.0)(h, y).item() == pytest.approx(-0.02)
    real = outputs_for(5, 12, seed=9)
    torch.testing.assert_close(MeanAbsoluteError()(outputs, real), F.l1_loss(outputs, real))
    torch.testing.assert_close(MeanSquaredError()(outputs, real), F.mse_loss(outputs, real))
    torch.testing.assert_close(Huber(0.4)(outputs, real), F.huber_loss(outputs, real, delta=0.4))


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_one_output_takes_either_coding_of_two_classes(shape):
    outputs = outputs_for(1, 6).reshape(shape)
    zero_one = torch.tensor([0, 1, 1, 0, 1, 0])
    for loss in (BinaryCrossEntropy(0.7), MulticlassHinge(), KantorovichRubinstein()):
        found = loss.per_record(outputs, zero_one)
        assert torch.equal(found, loss.per_record(outputs, 2 * zero_one - 1))
        assert torch.equal(found, loss.per_record(outputs, zero_one.double().reshape(shape)))
    torch.testing.assert_close(
        BinaryCrossEntropy()(outputs, zero_one),
        F.binary_cross_entropy_with_logits(outputs.flatten(), zero_one.double()),
    )


def test_positions_of_one_record_are_averaged():
    outputs = torch.randn(3, 4, 7, dtype=torch.float64)
    targets = torch.randint(4, (3, 7))
    expected = F.cross_entropy(outputs, targets, reduction="none").mean(dim=1)
    torch.testing.assert_close(CrossEntropy().per_record(outputs, targets), expected)
    torch.testing.assert_close(losses_of(CrossEntropy(), outputs, targets), expected)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "says"),
    [
        (BinaryCrossEntropy(), (4, 3), (4,), "one output per record; the model gives 3"),
        (MulticlassHinge(), (4, 3, 2), (4,), "(records, classes)"),
        (KantorovichRubinstein(), (4, 3, 2), (4,), "(records, classes)"),
        (CosineSimilarity(), (4, 1), (4,), "two outputs"),
        (MeanAbsoluteError(), (4, 3), (4,), "3 outputs per record, and there are 1 targets"),
        (Huber(), (4,), (4, 4), "1 outputs per record, and there are 4 targets"),
    ],
)
def test_shapes_that_do_not_fit_are_named(loss, outputs, targets, says):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        loss(torch.zeros(outputs), torch.zeros(targets))
    assert says in str(error.value)
    if isinstance(loss, BinaryCrossEntropy):
        with pytest.raises(ValueError, match="the model gives 3"):
            loss.lipschitz_for(3)


def test_real_targets_do_not_broadcast():
    outputs, targets = outputs_for(1, 5), outputs_for(1, 5, seed=3).flatten()
    expected = (outputs.flatten() - targets).abs().mean()
    torch.testing.assert_close(MeanAbsoluteError()(outputs, targets), expected)


@pytest.mark.parametrize(
    "engine", [tacit.engines.BookKeeping(), tacit.engines.PerRecord()], ids=["book", "func"]
)
@pytest.mark.parametrize(("loss", "num_outputs"), CASES, ids=IDS)
def test_engines_take_every_loss(loss, num_outputs, engine):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, num_outputs).double()
    inputs, targets = outputs_for(3, 6, seed=5), targets_for(loss, num_outputs, 6)
    batch = tacit.sampling.batch_of(inputs, targets, divisor=6, scheme=tacit.sampling.Poisson(0.5))
    (block,) = tacit.PerSampleClip(1e9, engine=engine)(model, loss, batch).blocks
    model.zero_grad()
    (6 * loss(model(inputs), targets)).backward()
    for total, parameter in zip(block.sums, model.parameters(), strict=True):
        torch.testing.assert_close(total, parameter.grad, rtol=1e-8, atol=1e-10)


def test_every_loss_is_among_the_cases():
    kinds = [getattr(losses, name) for name in losses.__all__]
    wanted = {k for k in kinds if isinstance(k, type) and issubclass(k, losses.LipschitzLoss)}
    elsewhere = {losses.LipschitzLoss, losses.TokenCrossEntropy}  # its outputs have tokens
    assert {type(loss) for loss, _ in CASES} == wanted - elsewhere


# One record alone in its class: where losses that count classes lose their constant.
B, K = 64, 10


def share_of_the_first(loss, outputs, targets):
    """The first record's row of ∇ of the loss summed over records."""
    leaf = outputs.clone().requires_grad_(True)
    (found,) = torch.autograd.grad(len(outputs) * loss(leaf, targets), leaf)
    return found[0]


def counted(outputs, targets):
    """The published loss, its priors counted in the batch."""
    one_hot = torch.nn.functional.one_hot(targets, K).to(outputs.dtype)
    ones = one_hot / one_hot.sum(dim=0).clamp_min(1)
    rest = (1 - one_hot) / (1 - one_hot).sum(dim=0).clamp_min(1)
    return -((ones - rest) * outputs).sum(dim=0).mean()


@pytest.mark.parametrize(
    "loss", [KantorovichRubinstein(), HingeKantorovichRubinstein(2.0, 1.0)], ids=str
)
def test_its_gradient_does_not_know_the_others(loss):
    outputs = outputs_for(K, B)
    alone = torch.zeros(B, dtype=torch.long)
    alone[1:] = 1 + torch.arange(B - 1) % (K - 1)
    crowded = torch.zeros(B, dtype=torch.long)
    for targets in (alone, crowded):
        found = share_of_the_first(loss, outputs, targets)
        expected = share_of_the_first(loss, outputs[:1], targets[:1])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert found.norm() <= loss.lipschitz_for(K) * (1 + 1e-12)


def test_the_published_loss_breaks_its_bound_there():
    """Why ours has fixed priors."""
    alone = torch.zeros(B, dtype=torch.long)
    alone[1:] = 1 + torch.arange(B - 1) % (K - 1)
    found = share_of_the_first(counted, outputs_for(K, B), alone)
    assert found.norm() > 6


@pytest.mark.parametrize(("loss", "num_outputs"), CASES, ids=IDS)
def test_no_loss_lets_one_record_move_another_s_gradient(loss, num_outputs):
    outputs, targets = outputs_for(num_outputs, 12), targets_for(loss, num_outputs, 12)
    before = share_of_the_first(loss, outputs, targets)
    outputs[1:] = 1e3 * outputs_for(num_outputs, 11, seed=7)
    targets[1:] = targets_for(loss, num_outputs, 11, seed=8)
    torch.testing.assert_close(share_of_the_first(loss, outputs, targets), before)
