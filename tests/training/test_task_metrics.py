"""A report shows the metrics of the task, and never an accuracy that is not one."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from small_trainer import small_trainer, some_records
from torch import nn

import tacit
from tacit.certificates import certified_accuracy
from tacit.diagnostics import accuracy_curve, confusion_matrix
from tacit.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Huber,
    MeanSquaredError,
    MulticlassHinge,
    PreActivationPenalty,
    SumSquaredError,
    Task,
    WithConstant,
)
from tacit.report import save_run


def prices(count=60, seed=1, outputs=1):
    """House prices, all of them positive, as an outsider's regression has them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    targets = 5 + inputs[:, :outputs] + 0.1 * torch.randn(count, outputs, generator=generator)
    return tacit.Records(inputs, targets.squeeze(1) if outputs == 1 else targets, public_size=count)


def rows_of(records):
    return zip(records.inputs, records.targets, strict=True)


def regressor(outputs=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs))
    with torch.no_grad():
        model[2].bias.fill_(4.0)  # positive, like every target
    return model


@pytest.mark.parametrize("loss", [Huber(), MeanSquaredError(), nn.MSELoss(), F.l1_loss, None])
def test_a_regression_has_no_accuracy(loss):
    """Read as two classes by its sign, this model would be 100% accurate."""

    def unknown(outputs, targets):
        return (outputs.squeeze(1) - targets).square().mean()

    model, records = regressor(), prices()
    found = tacit.evaluate(model, records, loss or unknown)
    assert found.accuracy is None
    with torch.no_grad():  # (60, 1) against (60,) would broadcast to 3,600 pairs
        each = [(loss or unknown)(model(x[None]), y[None]) for x, y in rows_of(records)]
    assert found.loss == pytest.approx(float(torch.stack(each).mean()), rel=1e-5)
    assert (found.r_squared is None) == (loss is None)


@pytest.mark.parametrize("outputs", [1, 3])
def test_regression_metrics_are_those_of_scikit_learn(outputs):
    model, records = regressor(outputs), prices(outputs=outputs)
    found = tacit.evaluate(model, records, Huber(), batch_size=7)
    with torch.no_grad():
        predicted = model(records.inputs).reshape(len(records), -1).double().numpy()
    true = records.targets.reshape(len(records), -1).double().numpy()
    assert found.mean_absolute_error == pytest.approx(mean_absolute_error(true, predicted))
    flat = root_mean_squared_error(true.ravel(), predicted.ravel())
    assert found.root_mean_squared_error == pytest.approx(flat)
    r2 = r2_score(true, predicted, multioutput="variance_weighted")
    assert found.r_squared == pytest.approx(r2)


def test_equal_targets_have_no_r_squared():
    records = tacit.Records(torch.randn(5, 4), torch.full((5,), 2.0))
    found = tacit.evaluate(regressor(), records, Huber())
    assert found.r_squared is None
    assert found.root_mean_squared_error > 0


def test_a_regression_is_reported_alike_everywhere(tmp_path, capsys):
    run = small_trainer(
        regressor(), prices(), loss=Huber(), evaluate_on=tacit.HeldOut(prices(seed=2), every=2),
        callbacks=[tacit.training.ProgressBar()],
    ).fit()  # fmt: skip
    assert [point.step for point in run.history] == [2, 4]
    facts = save_run(run, tmp_path, prices(seed=2))
    written = json.loads((tmp_path / "run.json").read_text())
    for told in (facts, written, *written["history"]):
        assert told["accuracy"] is None
        assert told["root_mean_squared_error"] > 0
    assert facts["certificate"] is None
    last = written["history"][-1]
    assert last["root_mean_squared_error"] == facts["root_mean_squared_error"]
    shown = run.summary(prices(seed=2)) + capsys.readouterr().err
    assert "accuracy" not in shown
    assert f"{facts['root_mean_squared_error']:.4g}" in shown
    assert "R²" in shown
    assert (tmp_path / "progress.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no classes"):
        accuracy_curve([run])
    with pytest.raises(ValueError, match="no classes"):
        confusion_matrix(run.model, prices())


def test_a_lipschitz_regression_has_no_certified_accuracy():
    model = tacit.models.lipschitz_mlp((4,), 1)
    with pytest.raises(ValueError, match="regression"):
        certified_accuracy(model, prices())


@pytest.mark.parametrize("loss", [BinaryCrossEntropy(), MulticlassHinge(), nn.SoftMarginLoss()])
@pytest.mark.parametrize("targets", [(0, 1), (-1, 1)])
def test_one_output_decides_by_its_sign_between_two_classes(loss, targets):
    inputs = torch.tensor([[-2.0], [3.0], [1.0], [-1.0]])
    classes = torch.tensor([targets[0], targets[1], targets[0], targets[0]])
    classes = classes.float().unsqueeze(1) if isinstance(loss, nn.Module) else classes
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    records = tacit.Records(inputs, classes)
    assert tacit.evaluate(model, records, loss).accuracy == 0.75
    # One target that is neither, in another batch: the sign decides nothing about it.
    wild = tacit.Records(inputs, torch.cat([classes[:3], torch.full_like(classes[:1], 7)]))
    assert tacit.evaluate(model, wild, loss, batch_size=2).accuracy is None


def test_an_output_that_is_trained_towards_0_or_1_has_no_accuracy_by_sign():
    records = some_records()
    model = nn.Linear(4, 1)
    assert tacit.evaluate(model, records, SumSquaredError()).accuracy is None
    assert tacit.evaluate(nn.Linear(4, 2), records, SumSquaredError()).accuracy is not None


def test_a_loss_that_declares_nothing_needs_declared_classes():
    """Three quantiles of a count: integer targets, three outputs, and no class anywhere."""

    def pinball(outputs, targets):
        return (outputs - targets[:, None]).abs().mean()

    inputs, counts = torch.randn(20, 4), torch.randint(0, 3, (20,))
    model = nn.Linear(4, 3)
    assert tacit.evaluate(model, tacit.Records(inputs, counts), pinball).accuracy is None
    known = tacit.Records(inputs, counts, num_classes=3)
    assert tacit.evaluate(model, known, F.cross_entropy).accuracy is not None

    def own(outputs, targets):
        return F.cross_entropy(outputs, targets)

    share = (model(inputs).argmax(1) == counts).double().mean()
    assert tacit.evaluate(model, known, own).accuracy == share


def test_positions_are_counted_along_the_axis_that_the_loss_has_them():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(6, 5, 4, generator=generator)  # records, positions, classes
    targets = torch.randint(0, 4, (6, 5), generator=generator)
    share = float((outputs.argmax(-1) == targets).double().mean())
    model = nn.Identity()
    model.register_parameter("unused", nn.Parameter(torch.zeros(1)))

    def flat(outputs, targets):
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    tokens = tacit.Records(outputs, targets, num_classes=4)
    assert tacit.evaluate(model, tokens, flat).accuracy == pytest.approx(share)
    by_channel = tacit.Records(outputs.transpose(1, 2), targets)
    assert tacit.evaluate(model, by_channel, CrossEntropy()).accuracy == pytest.approx(share)


def test_sums_and_declared_constants_keep_the_task():
    h, y = torch.randn(3, 2), torch.tensor([0, 1, 1])
    total = CrossEntropy() + 0.1 * PreActivationPenalty()
    assert total.task_for(h, y) is Task.CLASSIFICATION
    assert (Huber() + CrossEntropy()).task_for(h, y) is None
    assert WithConstant(CrossEntropy(), 2.0).task_for(h, y) is Task.CLASSIFICATION
    own = WithConstant(lambda a, b: (a - b).abs().mean(), 2.0, task=Task.REGRESSION)
    assert own.task_for(h, y) is Task.REGRESSION
