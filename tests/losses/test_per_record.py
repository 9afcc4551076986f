"""Each record's own loss: of PyTorch's losses, of a user's function, of trees of outputs."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import tacit
from tacit.losses import CrossEntropy, MeanSquaredError, losses_of
from tacit.losses.registry import TORCH_LOSSES
from tacit.pytrees import take_rows, tensors_of

transformers = pytest.importorskip("transformers")
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput  # noqa: E402

B, C, T = 6, 4, 5


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(*shape, seed=1):
    return torch.randint(C, shape, generator=torch.Generator().manual_seed(seed))


def alone(loss, outputs, targets):
    """The definition: loss(outputs[i:i+1], targets[i:i+1])."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(len(tensors_of(outputs)[0])):
            rows = slice(i, i + 1)
            found.append(loss(take_rows(outputs, rows), take_rows(targets, rows)).reshape(()))
    return torch.stack(found)


WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
SOME_IGNORED = classes(B, T)
SOME_IGNORED[:, 1] = -100
SOME_IGNORED[2, 1:] = -100
PROBABILITIES = random(B, C).softmax(1)
TOKENS = random(B, C, T)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("kind", "options", "outputs", "targets"),
    [
        (nn.CrossEntropyLoss, {}, random(B, C), classes(B)),
        (nn.CrossEntropyLoss, {"weight": WEIGHT}, random(B, C), classes(B)),
        (nn.CrossEntropyLoss, {"label_smoothing": 0.2}, random(B, C), classes(B)),
        (nn.CrossEntropyLoss, {"weight": WEIGHT}, random(B, C), PROBABILITIES),
        (nn.CrossEntropyLoss, {"label_smoothing": 0.2}, random(B, C), PROBABILITIES),
        (nn.CrossEntropyLoss, {}, TOKENS, classes(B, T)),
        (nn.CrossEntropyLoss, {}, TOKENS, SOME_IGNORED),
        (nn.CrossEntropyLoss, {"weight": WEIGHT}, TOKENS, SOME_IGNORED),
        (
            nn.CrossEntropyLoss,
            {"weight": WEIGHT, "label_smoothing": 0.3},
            TOKENS,
            SOME_IGNORED,
        ),
        (nn.CrossEntropyLoss, {"label_smoothing": 0.3}, TOKENS, TOKENS.softmax(1)),
        (nn.CrossEntropyLoss, {"ignore_index": 2, "weight": WEIGHT}, TOKENS, classes(B, T)),
        (nn.NLLLoss, {}, random(B, C).log_softmax(1), classes(B)),
        (nn.NLLLoss, {"weight": WEIGHT}, TOKENS.log_softmax(1), SOME_IGNORED),
        (nn.MSELoss, {}, random(B, C), random(B, C, seed=2)),
        (nn.MSELoss, {}, random(B), random(B, seed=2)),
        (nn.MSELoss, {}, random(B, 1), random(B, seed=2)),
        (nn.L1Loss, {}, random(B, C, T), random(B, C, T, seed=2)),
        (nn.SmoothL1Loss, {"beta": 0.3}, random(B, C), random(B, C, seed=2)),
        (nn.HuberLoss, {"delta": 0.3}, random(B, C), random(B, C, seed=2)),
        (nn.BCELoss, {}, random(B, C).sigmoid(), random(B, C, seed=2).sigmoid()),
        (nn.BCEWithLogitsLoss, {}, random(B), classes(B).clamp(max=1).double()),
        (
            nn.BCEWithLogitsLoss,
            {"pos_weight": WEIGHT, "weight": WEIGHT},
            random(B, C),
            random(B, C, seed=2).sigmoid(),
        ),
        (nn.KLDivLoss, {}, random(B, C).log_softmax(1), PROBABILITIES),
        (nn.KLDivLoss, {"log_target": True}, random(B, C).log_softmax(1), PROBABILITIES.log()),
        (nn.PoissonNLLLoss, {"full": True}, random(B, C), classes(B, C).double()),
        (nn.SoftMarginLoss, {}, random(B, C), random(B, C, seed=2).sign()),
        (nn.HingeEmbeddingLoss, {}, random(B, C), random(B, C, seed=2).sign()),
        (nn.MultiMarginLoss, {"weight": WEIGHT, "p": 2}, random(B, C), classes(B)),
        (nn.MultiLabelMarginLoss, {}, random(B, C), classes(B, C)),
        (nn.MultiLabelSoftMarginLoss, {}, random(B, C), classes(B, C).clamp(max=1).double()),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_pytorch_s_losses_are_those_of_batches_of_one(kind, options, outputs, targets, reduction):
    module = kind(**options, reduction=reduction)
    expected = alone(module, outputs, targets)
    leaf = outputs.clone().requires_grad_()
    found = losses_of(module, leaf, targets)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert module.reduction == reduction
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    (wanted,) = torch.autograd.grad(alone(module, leaf, targets).sum(), leaf)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
    function = functools.partial(getattr(F, TORCH_LOSSES[kind][0]), **options, reduction=reduction)
    torch.testing.assert_close(losses_of(function, outputs, targets), expected)
    if reduction == "mean" and not options:
        plain = getattr(F, TORCH_LOSSES[kind][0])
        torch.testing.assert_close(losses_of(plain, outputs, targets), expected)
    # A user's function around it is taken apart by vmap, with the same numbers.
    own = lambda h, y: module(h, y)  # noqa: E731
    torch.testing.assert_close(losses_of(own, outputs, targets), expected)


def test_a_batch_mean_for_each_batch_is_a_sum_for_each_record():
    loss, h = nn.KLDivLoss(reduction="batchmean"), random(B, C).log_softmax(1)
    found = losses_of(loss, h, PROBABILITIES)
    torch.testing.assert_close(found, alone(loss, h, PROBABILITIES))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_a_record_without_a_target_has_no_loss_and_no_gradient(weight, smoothing):
    h, y = TOKENS.clone().requires_grad_(), classes(B, T)
    y[3] = -100
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing)
    found = losses_of(loss, h, y)
    (gradient,) = torch.autograd.grad(found.sum(), h)
    assert found[3] == 0
    assert gradient[3].abs().max() == 0
    assert gradient.isfinite().all()


def test_class_weights_that_cancel_are_warned_of_and_the_remedy_weighs():
    h, y = random(B, C), classes(B)
    with pytest.warns(UserWarning, match="reduction='none'"):
        cancelled = losses_of(nn.CrossEntropyLoss(weight=WEIGHT), h, y)
    plain = losses_of(nn.CrossEntropyLoss(), h, y)
    torch.testing.assert_close(cancelled, plain)
    weighed = losses_of(nn.CrossEntropyLoss(weight=WEIGHT, reduction="none"), h, y)
    torch.testing.assert_close(weighed, WEIGHT[y] * plain)


def test_a_module_that_was_changed_by_its_user_is_not_taken_for_pytorch_s():
    loss = nn.MSELoss()
    loss.forward = lambda h, y: (h - y).abs().mean()
    h, y = random(B, C), random(B, C, seed=2)
    torch.testing.assert_close(losses_of(loss, h, y), (h - y).abs().mean(1))


def test_one_number_per_record_is_taken_as_it_is():
    calls = []

    def own(h, y):
        calls.append(h.shape)
        return F.cross_entropy(h, y, reduction="none")

    h, y = random(B, C), classes(B)
    torch.testing.assert_close(losses_of(own, h, y), F.cross_entropy(h, y, reduction="none"))
    assert calls == [h.shape]


def test_a_mean_and_a_sum_are_taken_apart_and_the_batch_is_looked_at_once():
    calls = []

    def own(h, y):
        calls.append(h.shape)
        return F.cross_entropy(h, y)

    h, y = random(B, C), classes(B)
    for _ in range(3):
        torch.testing.assert_close(losses_of(own, h, y), F.cross_entropy(h, y, reduction="none"))
    assert calls.count(h.shape) == 1
    total = losses_of(lambda h, y: F.cross_entropy(h, y, reduction="sum"), h, y)
    torch.testing.assert_close(total, F.cross_entropy(h, y, reduction="none"))


def test_a_loss_is_not_kept_alive():
    own = lambda h, y: h.mean()  # noqa: E731
    losses_of(own, random(B, C), classes(B))
    alive = weakref.ref(own)
    del own
    gc.collect()
    assert alive() is None


def test_a_statistic_of_the_batch_in_a_mean_is_that_of_one_record():
    def centred(h, y):
        return F.cross_entropy(h - h.mean(dim=0), y)

    found = losses_of(centred, random(B, C), classes(B))
    torch.testing.assert_close(found, torch.full_like(found, C).log())


def test_a_loss_that_vmap_cannot_take_runs_record_by_record():
    def by_value(h, y):
        return h.mean() if float(h.sum()) > 0 else -h.mean()

    h, y = random(B, C).requires_grad_(), classes(B)
    with pytest.warns(UserWarning, match="once per record"):
        found = losses_of(by_value, h, y)
    torch.testing.assert_close(found, h.mean(1).abs())
    (gradient,) = torch.autograd.grad(found.sum(), h)
    assert gradient.abs().min() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(losses_of(by_value, h, y), found)
    assert losses_of(by_value, h[:0], y[:0]).shape == (0,)


@pytest.mark.parametrize("value", [lambda h: h.mean(), lambda h: h.mean(1)])
def test_one_record_may_come_with_or_without_its_dimension(value):
    found = losses_of(lambda h, y: value(h), random(1, C), classes(1))
    torch.testing.assert_close(found, random(1, C).mean(1))
    empty = losses_of(lambda h, y: value(h), random(0, C), classes(0))
    assert empty.shape == (0,)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            lambda h, y: h.square().mean(1),
            r"shape \(6, 5\) for 6 records.*end it with `.mean\(1\)`",
        ),
        (lambda h, y: h.square(), r"end it with `.flatten\(1\).mean\(1\)`"),
        (lambda h, y: h.flatten(0, 1).mean(1), "records in the first dimension"),
        (lambda h, y: h.mean().item(), "one number per record"),
        (lambda h, y: None, "returns None"),
        (nn.MSELoss(reduction="none"), r"`.flatten\(1\).mean\(1\)`"),
    ],
)
def test_other_shapes_say_what_to_write(loss, says):
    with pytest.raises(ValueError, match=says):
        losses_of(loss, TOKENS, random(B, C, T, seed=2))
    # The line that is recommended.
    mended = losses_of(lambda h, y: h.square().flatten(1).mean(1), TOKENS, classes(B))
    torch.testing.assert_close(mended, TOKENS.square().mean((1, 2)))


@dataclass
class Detection:
    boxes: torch.Tensor
    scores: torch.Tensor


@pytest.mark.parametrize(
    "outputs",
    [
        SequenceClassifierOutput(logits=random(B, C), hidden_states=(random(B, 3), random(B, 3))),
        {"logits": random(B, C), "extra": random(B, 2)},
        (random(B, C),),
    ],
    ids=["ModelOutput", "dict", "tuple"],
)
@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        0.5 * CrossEntropy() + 0.5 * CrossEntropy(),
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        tacit.losses.WithConstant(F.cross_entropy, 9.0),
    ],
    ids=["ours", "sum", "module", "function", "with constant"],
)
def test_a_loss_of_one_tensor_gets_the_logits(loss, outputs):
    y = classes(B)
    expected = F.cross_entropy(random(B, C), y, reduction="none")
    torch.testing.assert_close(losses_of(loss, outputs, y), expected)
    torch.testing.assert_close(losses_of(loss, outputs, {"class": y}), expected)
    if isinstance(loss, CrossEntropy):
        torch.testing.assert_close(loss(outputs, y), expected.mean())


def test_a_loss_of_one_tensor_refuses_several_and_says_what_to_do():
    y = classes(B)
    with pytest.raises(ValueError, match="none of them called logits"):
        losses_of(CrossEntropy(), (random(B, C), random(B, C)), y)
    with pytest.raises(ValueError, match="one tensor of targets, and the records have 0"):
        losses_of(CrossEntropy(), random(B, C), ())
    mended = losses_of(lambda out, y: CrossEntropy()(out[0], y), (random(B, C), TOKENS), y)
    torch.testing.assert_close(mended, F.cross_entropy(random(B, C), y, reduction="none"))


@pytest.mark.parametrize("per_record", [False, True])
@pytest.mark.parametrize("vmaps", [False, True])
def test_a_function_of_several_outputs_and_targets(per_record, vmaps):
    def own(out, y):
        h = out.scores if vmaps or float(out.scores.sum()) < 1e9 else None
        scores = CrossEntropy().per_record(h, y["class"])
        boxes = MeanSquaredError().per_record(out.boxes, y["box"])
        return scores + 2 * boxes if per_record else (scores + 2 * boxes).mean()

    out = Detection(random(B, 4), random(B, C))
    y = {"class": classes(B), "box": random(B, 4, seed=3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = losses_of(own, out, y)
    boxes = (out.boxes - y["box"]).square().mean(1)
    expected = F.cross_entropy(out.scores, y["class"], reduction="none") + 2 * boxes
    torch.testing.assert_close(found, expected)


def test_without_targets_the_loss_reads_its_outputs():
    out = (random(B, C), random(B, C, seed=2))
    for own in (lambda o, _: (o[0] - o[1]).abs().mean(), lambda o, _: (o[0] - o[1]).abs().mean(1)):
        torch.testing.assert_close(losses_of(own, out, ()), (out[0] - out[1]).abs().mean(1))


class Cache:
    """Something opaque with all records inside, such as past keys and values."""

    def __init__(self, rows):
        self.rows = rows


def test_values_of_all_records_are_kept_from_a_single_one():
    out = CausalLMOutput(loss=torch.tensor(3.0), logits=random(B, T, C))
    tree = {"out": out, "cache": Cache(random(B, 2)), "nothing": None}
    y = classes(B, T)

    def own(tree, y):
        assert tree["nothing"] is None
        return F.cross_entropy(tree["out"].logits.flatten(0, 1), y.flatten())

    expected = F.cross_entropy(out.logits.transpose(1, 2), y, reduction="none").mean(1)
    torch.testing.assert_close(losses_of(own, tree, y), expected)
    for reads in (
        lambda tree, y: tree["out"].loss,
        lambda tree, y: 2 * tree["out"].loss,
        lambda tree, y: tree["cache"].rows.mean(),
    ):
        with pytest.raises(ValueError, match=r"outputs\['out'\]\['loss'\].*TokenCrossEntropy"):
            losses_of(reads, tree, y)
    # What is recommended.
    found = losses_of(tacit.losses.TokenCrossEntropy(), out, y)
    torch.testing.assert_close(found, expected)


def test_the_loss_that_a_model_computes_is_taken_for_one_record_alone():
    out = CausalLMOutput(loss=torch.tensor(3.0), logits=random(1, T, C))
    assert losses_of(lambda out, y: out.loss, out, classes(1, T)).tolist() == [3.0]


@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
        F.cross_entropy,
        lambda h, y: F.cross_entropy(h, y),
        lambda h, y: F.cross_entropy(h, y, reduction="none"),
    ],
)
@pytest.mark.filterwarnings("ignore:class weights")
def test_the_step_can_be_recorded(loss):
    h, y = random(B, C), classes(B)
    losses_of(loss, h, y)

    def step(h, y):
        h = h.detach().requires_grad_()
        found = losses_of(loss, h, y)
        return found, torch.autograd.grad(found.sum(), h)[0]

    graph = make_fx(step)(h, y)
    other, classes_of_other = random(B, C, seed=7), classes(B, seed=8)
    for a, b in zip(graph(other, classes_of_other), step(other, classes_of_other), strict=True):
        torch.testing.assert_close(a, b)
