"""Metrics of classes and labels are those of scikit-learn, and a constant answer stands beside."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from small_trainer import small_trainer, some_records
from torch import nn

import tacit
from tacit.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Huber,
    MultiLabelCrossEntropy,
    Task,
    check_loss,
)
from tacit.losses.registry import task_of
from tacit.training.evaluation import baseline_of


class Fixed(nn.Module):
    """Returns its input, so that a test chooses the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x


def rounded(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random outputs with many ties: multiples of 1/4, whose differences are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).mul(4).round().div(4)


@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("num_classes", [2, 3, 7])
def test_classes_are_measured_as_scikit_learn_does(num_classes, tau):
    outputs = rounded(211, num_classes)
    y = torch.randint(num_classes, (211,), generator=torch.Generator().manual_seed(1))
    found = tacit.evaluate(Fixed(), tacit.Records(outputs, y, num_classes), CrossEntropy(tau), 64)
    p = torch.softmax(outputs.double() / tau, dim=1).numpy()
    assert found.balanced_accuracy == pytest.approx(
        sk.balanced_accuracy_score(y, outputs.argmax(1))
    )
    scores = p[:, 1] if num_classes == 2 else p
    assert found.auroc == pytest.approx(sk.roc_auc_score(y, scores, multi_class="ovr"))
    assert found.log_loss == pytest.approx(sk.log_loss(y, p, labels=range(num_classes)))
    assert found.accuracy == sk.accuracy_score(y, outputs.argmax(1))


@pytest.mark.parametrize("negative", [0, -1])
def test_one_output_is_measured_as_scikit_learn_does(negative):
    outputs = rounded(150, 1)
    truth = torch.randint(2, (150,), generator=torch.Generator().manual_seed(2))
    y = torch.where(truth > 0, 1, negative)
    found = tacit.evaluate(Fixed(), tacit.Records(outputs, y), BinaryCrossEntropy(0.5))
    p = torch.sigmoid(outputs.double() / 0.5).squeeze(1)
    assert found.auroc == pytest.approx(sk.roc_auc_score(truth, p))
    assert found.log_loss == pytest.approx(sk.log_loss(truth, p))
    assert found.balanced_accuracy == pytest.approx(sk.balanced_accuracy_score(truth, p > 0.5))


def test_labels_are_measured_one_by_one_and_averaged():
    outputs = rounded(90, 4)
    y = (rounded(90, 4, seed=3) > 0.3).float()
    found = tacit.evaluate(Fixed(), tacit.Records(outputs, y), MultiLabelCrossEntropy(), 32)
    p = torch.sigmoid(outputs.double()).numpy()
    assert found.task is Task.MULTI_LABEL
    assert found.auroc == pytest.approx(sk.roc_auc_score(y, p, average="macro"))
    each = [sk.balanced_accuracy_score(y[:, k], p[:, k] > 0.5) for k in range(4)]
    assert found.balanced_accuracy == pytest.approx(np.mean(each))
    assert found.log_loss == pytest.approx(
        np.mean([sk.log_loss(y[:, k], p[:, k]) for k in range(4)])
    )
    assert found.accuracy == pytest.approx(float(((outputs > 0) == (y > 0)).double().mean()))
    assert found.loss == pytest.approx(found.log_loss, rel=1e-5)


def test_a_class_that_nobody_has_does_not_count():
    outputs, y = rounded(40, 3), torch.arange(40) % 2
    found = tacit.evaluate(Fixed(), tacit.Records(outputs, y, 3), CrossEntropy())
    p = torch.softmax(outputs.double(), dim=1).numpy()
    assert found.auroc == pytest.approx(
        np.mean([sk.roc_auc_score(y == k, p[:, k]) for k in (0, 1)])
    )
    same = tacit.evaluate(Fixed(), tacit.Records(outputs, 0 * y, 3), CrossEntropy())
    assert same.auroc is None
    assert same.log_loss is not None


def test_outputs_that_are_not_finite_have_no_auroc():
    outputs, y = rounded(10, 3), torch.arange(10) % 3
    outputs[0, 0] = float("nan")
    found = tacit.evaluate(Fixed(), tacit.Records(outputs, y, 3), CrossEntropy())
    assert (found.auroc, found.balanced_accuracy, found.log_loss) == (None, None, None)
    assert found.accuracy is not None


def test_the_baseline_is_that_of_the_held_out_records():
    y = torch.tensor([0, 1, 1, 2, 1])
    records = tacit.Records(torch.zeros(5, 2), y, 3)
    assert baseline_of(records, Task.CLASSIFICATION).accuracy == 0.6
    labels = tacit.Records(torch.zeros(4, 2), torch.tensor([[1, 0], [1, 1], [1, 0], [0, 1]]))
    assert baseline_of(labels, Task.MULTI_LABEL).accuracy == pytest.approx((0.75 + 0.5) / 2)
    values = tacit.Records(torch.zeros(3, 2), torch.tensor([0.0, 3.0, 6.0]))
    found = baseline_of(values, Task.REGRESSION)
    assert (found.root_mean_squared_error, found.mean_absolute_error) == pytest.approx((6**0.5, 2))
    assert baseline_of(records.take(slice(0)), Task.CLASSIFICATION) is None
    assert baseline_of(records, None) is None


def test_a_model_that_is_no_better_than_a_constant_is_said_to_be():
    run = small_trainer(evaluate_on=some_records(seed=9)).fit()
    alike = tacit.Records(torch.zeros(5, 4), torch.tensor([0, 1, 0, 1, 0]), 2)
    facts = run.facts(alike)  # equal inputs have one answer
    assert any(
        "has not beaten the most frequent class of the held-out" in n for n in facts["notes"]
    )
    assert facts["baseline"]["accuracy"] == 0.6
    assert "of a constant answer" in run.summary(alike)
    with torch.no_grad():
        for p in run.model.parameters():
            p.zero_()
    better = run.facts(tacit.Records(torch.zeros(5, 4), torch.zeros(5, dtype=torch.long), 2))
    assert better["accuracy"] == better["baseline"]["accuracy"] == 1.0
    assert any("has not beaten" in note for note in better["notes"])


def test_errors_are_in_the_targets_own_units():
    model = nn.Linear(4, 1)
    inputs = torch.randn(30, 4)
    records = tacit.Records(inputs, model(inputs).detach().squeeze(1) + 0.5, public_size=30)
    run = small_trainer(model, records, loss=Huber(), callbacks=[]).fit()
    one, thousand = run.facts(records), run.facts(records, 1000.0)
    for name in ("root_mean_squared_error", "mean_absolute_error"):
        assert thousand[name] == pytest.approx(1000 * one[name])
        assert thousand["baseline"][name] == pytest.approx(1000 * one["baseline"][name])
    assert thousand["r_squared"] == one["r_squared"]


@pytest.mark.parametrize("num_labels", [1, 5])
def test_the_loss_of_labels_keeps_the_contract(num_labels):
    found = check_loss(MultiLabelCrossEntropy(0.3), num_labels, steps=30)
    assert found.task is Task.MULTI_LABEL
    assert 0.9 < found.share <= 1 + 1e-9


def test_pytorchs_own_loss_of_labels_is_known():
    h = torch.zeros(3, 4)
    loss = nn.BCEWithLogitsLoss()
    assert task_of(loss, h, h) is Task.MULTI_LABEL
    assert task_of(loss, h[:, :1], h[:, :1]) is Task.BINARY
