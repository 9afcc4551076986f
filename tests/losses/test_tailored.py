"""The tailored loss and its parts: values, gradients, schedule, and what they say of constants."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from loss_cases import outputs_for
from torch import nn
from torch.func import grad, hessian, jacfwd, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import tacit
from tacit import losses
from tacit.engines import ClipTask
from tacit.engines.clipping import left_to_the_compiler
from tacit.errors import UnboundedLayer
from tacit.losses import (
    CrossEntropy,
    Focal,
    Huber,
    LipschitzSum,
    PreActivationPenalty,
    RecordLoss,
    SumAbsoluteError,
    SumHuber,
    SumSquaredError,
    TailoredLoss,
    WeightedSum,
    attack_constant,
    watched,
)
from tacit.losses.record_loss import losses_of

torch.set_num_threads(1)
H = torch.tensor([[0.5, -1.0, 2.0], [0.0, 0.25, -0.5]], dtype=torch.float64)
Y = torch.tensor([2, 1])
ONE_HOT = torch.tensor([[0.0, 0, 1], [0, 1, 0]], dtype=torch.float64)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    front = [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5), nn.Tanh()]
    return nn.Sequential(*front, nn.Linear(5, 3)).double()


def images(count=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.arange(count) % 3


def test_values_by_hand():
    squares = [0.5 * (0.25 + 1 + 1), 0.5 * (0 + 0.75**2 + 0.25)]
    assert SumSquaredError().per_record(H, Y).tolist() == pytest.approx(squares)
    sums = [0.5 + 1 + 1, 0 + 0.75 + 0.5]
    assert SumAbsoluteError().per_record(H, Y).tolist() == pytest.approx(sums)
    huber = [0.25 / 1.2 + (1 - 0.3) + (1 - 0.3), (0.75 - 0.3) + 0.25 / 1.2]
    assert SumHuber(0.6).per_record(H, Y).tolist() == pytest.approx(huber)
    p = H.softmax(dim=1)[[0, 1], Y]
    assert torch.allclose(Focal(3.0).per_record(H, Y), -((1 - p) ** 3) * p.log())
    assert torch.allclose(Focal(0.0)(H, Y), F.cross_entropy(H, Y))


def test_real_targets_stand_for_themselves():
    for loss in (SumSquaredError(), SumAbsoluteError(), SumHuber(0.3)):
        assert torch.equal(loss.per_record(H, ONE_HOT), loss.per_record(H, Y))
        with pytest.raises(ValueError, match="3 outputs per record, and there are 1 targets"):
            loss(H, Y.double())
    other = outputs_for(3, 2, seed=4)
    torch.testing.assert_close(SumHuber(0.3)(H, other), 3 / 0.3 * Huber(0.3)(H, other))


def test_one_output_is_coded_by_sign():
    h = torch.tensor([0.25, -0.5]).reshape(2, 1)
    found = SumSquaredError().per_record(h, torch.tensor([1, 0]))
    assert found.tolist() == pytest.approx([0.5 * 0.75**2, 0.125])
    with pytest.raises(ValueError, match="two outputs"):
        Focal()(h, torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="the model gives 1"):
        Focal().lipschitz_for(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 10.0])
def test_focal_is_finite_where_everything_is_learnt_or_lost(gamma, dtype):
    h = torch.tensor([[1e4, 0.0], [-1e4, 0.0], [40.0, 0.0], [0.0, 0.0]], dtype=dtype)
    h.requires_grad_(True)
    value = Focal(gamma).per_record(h, torch.zeros(4, dtype=torch.long))
    (slope,) = torch.autograd.grad(value.sum(), h)
    assert value.isfinite().all()
    assert slope.isfinite().all()
    assert value[0] == 0
    assert float(value[1].detach()) == pytest.approx(1e4)


def test_focal_s_constant_is_from_above_and_tight():
    for gamma in (0.0, 0.3, 2.0, 5.0, 200.0):
        p = torch.linspace(0, 1, 200_001, dtype=torch.float64)[1:-1].pow(3)
        f = (1 - p) ** (gamma + 1) - gamma * (1 - p) ** gamma * p * p.log()
        assert f.max() <= Focal(gamma).lipschitz_for(2) / math.sqrt(2) <= 1.002 * f.max()


def test_a_focal_constant_without_its_second_term_is_caught():
    """√2 is cross-entropy's; the factor (1 − p)^γ has a slope of its own."""
    with pytest.raises(ValueError, match="give a constant of at least that"):
        attack_constant(losses.WithConstant(Focal(2.0), math.sqrt(2)), 10)


def test_the_formula_with_a_network_written_by_hand():
    model, (x, y) = network(), images()
    loss = TailoredLoss(2.0, beta=11.0, gamma=5.0)
    loss.at(3.5)
    with watched(model, loss):
        found = loss.per_record(model(x), y)
    conv, first, last = model[0], model[3], model[5]
    h1 = F.conv2d(x, conv.weight, conv.bias)
    h2 = torch.tanh(h1).flatten(1) @ first.weight.T + first.bias
    h3 = torch.tanh(h2) @ last.weight.T + last.bias
    p = h3.softmax(dim=1)[torch.arange(4), y]
    alpha = 1 / (1 + math.exp(-1.5))
    penalty = h1.square().sum(dim=(1, 2, 3)) / 8 + h2.square().sum(dim=1) / 5
    squared = 0.5 * (h3 - F.one_hot(y, 3)).square().sum(dim=1)
    expected = (
        alpha * -((1 - p) ** 5) * p.log() + (1 - alpha) * squared + (1 - alpha) / 11 * penalty
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "loss",
    [
        TailoredLoss(1.0, beta=0.5, gamma=2.0),
        TailoredLoss(1.0, beta=None, gamma=0.0),
        PreActivationPenalty(),
        0.3 * PreActivationPenalty() + 2 * Focal(5.0),
    ],
    ids=str,
)
def test_gradients_in_the_weights_are_those_of_finite_differences(loss):
    model, (x, y) = network(), images()

    def value() -> torch.Tensor:
        with watched(model, loss):
            return loss(model(x), y)

    parameters = list(model.parameters())
    found = torch.autograd.grad(value(), parameters, materialize_grads=True)
    step = 1e-5
    for parameter, gradient in zip(parameters, found, strict=True):
        flat, numeric = parameter.data.view(-1), torch.zeros(parameter.numel()).double()
        for i in range(0, len(flat), 3):
            before = float(flat[i])
            flat[i] = before + step
            up = float(value().detach())
            flat[i] = before - step
            numeric[i] = (up - float(value().detach())) / (2 * step)
            flat[i] = before
        torch.testing.assert_close(gradient.view(-1)[::3], numeric[::3], rtol=1e-6, atol=1e-9)


def test_the_schedule():
    loss = TailoredLoss(7, beta=11, gamma=5)
    assert loss.alpha == pytest.approx(1 / (1 + math.exp(7)))
    loss.at(7)
    assert loss.alpha == 0.5
    loss.at(9.25)
    assert loss.alpha == pytest.approx(1 / (1 + math.exp(-2.25)))
    loss.at(1e6)
    assert loss.alpha == 1.0
    assert loss.fresh().epoch == 0
    assert TailoredLoss(1e6, 1.0, 0.0).alpha == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_alpha_is_a_tensor_that_a_recorded_step_reads(dtype):
    """A recording keeps tensors and not numbers: a replay must see the new epoch."""
    loss = TailoredLoss(0, beta=None, gamma=0.0)
    assert loss.per_record(H.to(dtype), Y).dtype == dtype
    recorded = make_fx(lambda h: loss.per_record(h, Y))(H.to(dtype))
    loss.at(3.0)
    torch.testing.assert_close(recorded(H.to(dtype)), loss.per_record(H.to(dtype), Y))
    alpha = 1 / (1 + math.exp(-3))
    expected = alpha * Focal(0.0).per_record(H, Y)
    expected = expected + (1 - alpha) * SumSquaredError().per_record(H, Y)
    torch.testing.assert_close(loss.per_record(H, Y), expected)


@pytest.mark.parametrize("transform", [hessian, lambda f: vmap(grad(f)), lambda f: jacfwd(grad(f))])
def test_alpha_outlives_the_transform_that_first_asked_for_it(transform):
    loss, other = (TailoredLoss(0, beta=None, gamma=2.0) for _ in range(2))

    def of_one(h):
        return loss(h.reshape(-1, 3), Y[: h.numel() // 3])

    transform(of_one)(H)
    loss.at(2.0)
    other.at(2.0)
    assert torch.equal(loss.per_record(H, Y), other.per_record(H, Y))
    transform(of_one)(H)


def test_alpha_outlives_inference_mode():
    loss = TailoredLoss(0, beta=None, gamma=2.0)
    with torch.inference_mode():
        loss(H, Y)
    loss.at(1.0)
    leaf = H.clone().requires_grad_(True)
    loss(leaf, Y).backward()
    assert leaf.grad is not None


class NobodyAsks(TorchDispatchMode):
    """Fails where a number is read off a tensor, or put into one: a recording would keep it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read"
        assert func is not torch.ops.aten.lift_fresh.default, "a number became a tensor"
        return func(*args, **(kwargs or {}))


def test_a_step_can_be_recorded_and_follows_the_epoch():
    """What a CUDA graph would hold: work that reads tensors and makes none from numbers."""
    model, (x, y) = network(), images()
    loss = TailoredLoss(1.0, beta=0.5, gamma=2.0)
    piece = tacit.sampling.batch_of(x, y, divisor=1.0, scheme=tacit.sampling.Poisson(0.5))
    names = dict(model.named_parameters())
    task = ClipTask(model, loss, names, (tuple(names),), (torch.tensor(0.1).double(),))
    engine = tacit.engines.BookKeeping()
    with watched(model, loss):
        engine.clipped_sums(task, piece)  # planned, as before it is recorded
        for epoch in (0.0, 3.0):
            loss.at(epoch)
            with NobodyAsks(), left_to_the_compiler():  # a CPU may ask otherwise, and does
                found = engine.clipped_sums(task, piece).sums
            again = loss.fresh()
            again.at(epoch)
            expected = tacit.PerSampleClip(0.1)(model, again, piece).blocks[0].sums
            for name, b in zip(names, expected, strict=True):
                torch.testing.assert_close(found[name], b)
    with pytest.raises(AssertionError, match="became a tensor"), NobodyAsks():
        loss.fresh()(H, Y)


def test_the_trainer_says_the_epoch_to_a_copy_of_its_own():
    seen = []

    class Note(tacit.Callback):
        def on_step(self, trainer, step):
            seen.append(trainer.loss.epoch)

    given = TailoredLoss(1.0, beta=2.0, gamma=1.0)
    given.at(5.0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    records = tacit.Records(torch.randn(20, 4), torch.randint(2, (20,)), 2, public_size=20)
    runs = []
    for _ in range(2):
        trainer = tacit.Trainer(
            model,
            given,
            tacit.PerSampleClip(0.1),
            tacit.PoissonSampler(records, 0.25, steps=5),
            torch.optim.SGD(model.parameters(), lr=0.1),
            tacit.Budget(3.0, 1e-4),
            evaluate_on=tacit.Unprotected(records),
            callbacks=[Note()],
        )
        runs.append(trainer.fit())
    assert seen == pytest.approx([0, 0.25, 0.5, 0.75, 1.0] * 2)
    assert given.epoch == 5.0
    assert runs[0].loss is not runs[1].loss
    assert math.isfinite(runs[0].history[-1].loss)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_epochs_are_public_functions_of_the_step():
    assert tacit.sampling.Poisson(0.02).epochs(150) == pytest.approx(3.0)
    assert tacit.sampling.WithoutReplacement(50, 5).epochs(15) == pytest.approx(1.5)
    assert tacit.sampling.ShuffledEpochs(8).epochs(12) == pytest.approx(1.5)
    assert tacit.sampling.MiniSets(10, 3, chosen=2).epochs(10) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "loss",
    [
        SumSquaredError(),
        PreActivationPenalty(),
        TailoredLoss(1, 1, 1),
        SumAbsoluteError() + SumSquaredError(),
    ],
    ids=str,
)
def test_what_has_no_constant_says_so(loss):
    assert not hasattr(loss, "lipschitz_for")
    assert not hasattr(loss, "lipschitz")
    model = tacit.models.lipschitz_mlp((4,), 3, hidden=(4,))
    batch = tacit.sampling.batch_of(
        torch.randn(3, 4), torch.tensor([0, 1, 2]), divisor=3, scheme=tacit.sampling.Poisson(0.5)
    )
    with pytest.raises(UnboundedLayer, match="no known Lipschitz constant"):
        tacit.Clipless()(model, loss, batch)


def test_a_query_that_begins_at_the_outputs_refuses_the_penalty():
    """With a clip Clipless takes losses without a constant; this one's gradient it would lose."""
    model = tacit.models.lipschitz_mlp((4,), 3, hidden=(4,))
    batch = tacit.sampling.batch_of(
        torch.randn(3, 4), torch.tensor([0, 1, 2]), divisor=3, scheme=tacit.sampling.Poisson(0.5)
    )
    with pytest.raises(ValueError, match="such as Clipless, cannot train with it"):
        tacit.Clipless(gradient_clip=1.0)(model, TailoredLoss(1, 1, 1), batch)
    tacit.Clipless(gradient_clip=1.0)(model, TailoredLoss(1, None, 1), batch)


def test_sums_are_opened_and_keep_constants_where_all_parts_have_one():
    both = 2 * (SumAbsoluteError() + 0.5 * CrossEntropy(0.5)) + -1 * Focal(0.0)
    assert type(both) is LipschitzSum
    assert both.weights == (2.0, 1.0, -1.0)
    expected = 2 * math.sqrt(5) + math.sqrt(2) / 0.5 + math.sqrt(2)
    assert both.lipschitz_for(5) == pytest.approx(expected)
    assert attack_constant(both, 5) <= 1
    mixed = both + SumSquaredError()
    assert type(mixed) is WeightedSum
    h, y = outputs_for(5, 6), torch.arange(6) % 5
    parts = [w * p.per_record(h, y) for w, p in zip(mixed.weights, mixed.parts, strict=True)]
    torch.testing.assert_close(mixed.per_record(h, y), torch.stack(parts).sum(dim=0))
    with pytest.raises(ValueError, match="use WeightedSum"):
        LipschitzSum((SumSquaredError(),), (1.0,))
    with pytest.raises(ValueError, match="give one per loss"):
        WeightedSum((SumSquaredError(),), ())
    with pytest.raises(ValueError, match="finite"):
        math.inf * SumSquaredError()
    with pytest.raises(TypeError):
        SumSquaredError() + 3


def test_a_sum_of_constants_forgotten_is_caught():
    both = SumAbsoluteError() + SumHuber(0.1)
    with pytest.raises(ValueError, match="give a constant of at least that"):
        attack_constant(losses.WithConstant(both, math.sqrt(4)), 4)


def test_a_user_s_part_is_not_trusted_with_the_whole_batch():
    class Mixing(RecordLoss):
        def per_record(self, outputs, targets):
            return (outputs - outputs.mean(dim=0)).square().sum(dim=1)

    h, y = outputs_for(4, 8), torch.arange(8) % 4
    both = 3 * Mixing() + CrossEntropy()
    torch.testing.assert_close(losses_of(both, h, y), losses_of(CrossEntropy(), h, y))
    assert Mixing().per_record(h, y).min() > 0


def test_a_sum_hands_the_epoch_on():
    part = TailoredLoss(1.0, None, 1.0)
    both = part + 0.5 * Focal()
    both.at(4.0)
    assert part.epoch == 4.0
    again = both.fresh()
    assert again.parts[0].epoch == 0.0
    assert part.epoch == 4.0
    assert both.needs_pre_activations is False
    assert (part + PreActivationPenalty()).needs_pre_activations is True


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Focal(-1.0), "gamma is -1.0"),
        (lambda: Focal(math.nan), "gamma is nan"),
        (lambda: TailoredLoss(math.inf, 1.0, 1.0), "threshold_epoch is inf"),
        (lambda: TailoredLoss(1.0, 0.0, 1.0), "beta is 0.0"),
        (lambda: TailoredLoss(1.0, 1.0, 1.0).at(-0.5), "epoch is -0.5"),
        (lambda: SumHuber(0.0), "beta is 0.0"),
    ],
)
def test_settings_without_a_meaning_are_refused(build, says):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        build()
    assert says in str(error.value)


def test_it_can_be_copied_and_named():
    loss = TailoredLoss(2, beta=1, gamma=5)
    copy.deepcopy(loss).at(3.0)
    assert loss.epoch == 0.0
    assert repr(loss) == "TailoredLoss(2, beta=1, gamma=5)"
