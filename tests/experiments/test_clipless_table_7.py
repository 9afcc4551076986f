"""Table 7's kernel: public constants, a bound that holds, and a choice that sees no test record."""

from __future__ import annotations

import random

import pytest
import torch

from experiments import runner
from experiments.clipless import table_7 as table
from experiments.clipless import table_7_models as models
from experiments.clipless.__main__ import PAPER


def a_setting(**changes: object):
    given = {
        "standardise": False,
        "features": 40,
        "bandwidth": 1.5,
        "hidden": 0,
        "rate": 1.0,
        "steps": 2,
        "scale": 30.0,
        "clip": 0.7,
        "learning_rate": 0.5,
        "limit": 2.0,
        "relevance": (1.0, 0.5, 1.5),
        "log_odds": -0.65,
        "ridge": 0.01,
    }
    return models.Setting(**{**given, **changes})


def test_a_record_has_norm_one_and_depends_on_no_other_record() -> None:
    inputs = torch.randn(30, 3) * 4
    rows = models.prepared("yeast", inputs, a_setting(), None)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(30))
    alone = models.prepared("yeast", inputs[7:8], a_setting(), None)
    torch.testing.assert_close(alone, rows[7:8])


def test_a_record_that_is_not_finite_keeps_to_the_bound() -> None:
    inputs = torch.tensor([[torch.nan, 0.0, 1.0], [torch.inf, 0.0, 1.0]])
    rows = models.prepared("yeast", inputs, a_setting(), None)
    assert rows.isfinite().all()
    assert rows.norm(dim=1).max() <= 1 + 1e-5


def test_the_filter_is_symmetric_and_enlarges_nothing() -> None:
    matrix = models.gradient_filter(3, a_setting())
    torch.testing.assert_close(matrix, matrix.T, atol=1e-4, rtol=1e-3)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    assert eigenvalues[0] > 0
    assert eigenvalues[-1] <= 1 + 1e-4


def test_the_filter_acts_on_the_released_gradient() -> None:
    model = models.network(40, a_setting())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    matrix = models.gradient_filter(3, a_setting())
    models.filter_gradients(optimizer, model, matrix)
    gradient = torch.randn(1, 40)
    model[-1].weight.grad = gradient.clone()
    optimizer.step()
    torch.testing.assert_close(model[-1].weight.detach(), -gradient @ matrix)


def test_the_log_odds_are_a_constant_of_the_head() -> None:
    setting = a_setting()
    model = models.network(40, setting)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["1.weight"]
    logits = setting.scale * model(torch.randn(5, 40))
    torch.testing.assert_close(logits, torch.full((5, 1), -0.65))


def test_training_ends_at_epsilon_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(4000, 3)
    y = (x[:, 0] + x[:, 1] ** 2 > 1).long()
    scorer, epsilon, _ = table.train("yeast", x[:3000], y[:3000], a_setting(features=200), seed=1)
    assert 0.99 < epsilon <= 1.0
    assert scorer.auroc(x[3000:], y[3000:]) > 70


def test_every_kernel_setting_is_in_its_space() -> None:
    for space in table.KERNELS.values():
        setting = table.draw_kernel(random.Random(0), space, 4)
        assert len(setting.relevance) == 4
        assert setting.rate in space.rates
        assert setting.steps in space.steps
        assert space.bandwidth[0] <= setting.bandwidth <= space.bandwidth[1]
        assert not setting.standardise  # nothing is released before training


@pytest.mark.usefixtures("real_data")
def test_a_nested_choice_is_given_the_training_records_of_its_own_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.Tensor] = []
    choose = table.choose

    def watched(name: str, x: torch.Tensor, *rest: object):
        seen.append(x)
        return choose(name, x, *rest)

    monkeypatch.setattr(table, "choose", watched)
    row = table.one_set("yeast", trials=1, seeds=2, seconds=60.0, nested=True)
    assert len(row["choices"]) == 2
    assert row["trials"] == 1
    for seed, x in enumerate(seen, start=1):
        assert torch.equal(x, table.load("yeast", seed)[0])


@pytest.mark.usefixtures("real_data")
def test_ceilings() -> None:
    found = runner.main(PAPER, ["ceilings", "--set", "yeast", "--repeats", "1"])
    assert all(55 < row["mean"] < 90 for row in found)


@pytest.mark.usefixtures("real_data")
def test_a_set_reports_its_choice_and_its_epsilon() -> None:
    row = table.one_set("yeast", trials=2, seeds=2, seconds=60.0)
    assert 40 < row["mean"] < 90
    assert row["epsilon"] <= 1.0
    assert row["trials"] == 2
