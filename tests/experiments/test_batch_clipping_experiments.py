"""The batch-clipping figures: every one lists its settings, and every kind of setting training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tacit
from experiments import results, runner
from experiments.batch_clipping import beyond, training
from experiments.batch_clipping.__main__ import EVERYTHING, FIGURES, PAPER, layer_kind
from experiments.batch_clipping.training import Setting
from tacit.losses.record_loss import losses_of
from tacit.sampling.scheme import Unit

# Small images where the network is large: resnet-18 and convnet take any.
SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 8, 8)}
SMALL = ["--small", "--device", "cpu", "--evaluations", "2"]


@pytest.fixture(autouse=True)
def made_up_records(made_up, monkeypatch: pytest.MonkeyPatch) -> None:
    def data(name: str, device: str, limit: int | None):
        public, private, test = (made_up(count, SHAPES[name]) for count in (40, 70, 16))
        return training.Data(public, private, test)

    monkeypatch.setattr(training, "data", data)


def test_there_is_every_figure() -> None:
    assert list(FIGURES) == [str(number) for number in range(1, 19)]


@pytest.mark.parametrize("key", FIGURES)
def test_every_figure_lists_settings_that_can_be_built(key: str) -> None:
    assert FIGURES[key].settings
    for setting in FIGURES[key].settings.values():
        assert isinstance(setting, Setting)
        assert setting.clipping in ("none", "batch", "individual", "general")
        assert setting.batch_size % setting.set_size == 0
        assert setting.network in training.DATA
    assert FIGURES[key].title.startswith(f"Figure {key}:")


def small(setting: Setting, tmp_path: Path, *arguments: str) -> dict:
    figure = runner.Figure("a rehearsal", {"it": setting})
    paper = replace(PAPER, figures={"0": figure})
    report = runner.main(paper, ["0", *SMALL, "--out", str(tmp_path), *arguments])["0"]
    assert (tmp_path / "small_figure_0.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "small_figure_0.json").read_text())
    assert written == report
    assert "torch" in written["environment"]
    (run,) = report["settings"]["it"]["runs"]
    assert 0 <= run["accuracy"] <= 1
    assert run["path"][-1][1] == run["accuracy"]
    return run


KINDS = {
    "BC": {"network": "lenet5"},
    "BC, full gradient": {"network": "lenet5", "constants": "full"},
    "BC, factors": {"network": "lenet5", "constants": "factors"},
    "BC, grouped": {"network": "lenet5", "constants": "grouped:3"},
    "BC, original": {"network": "lenet5", "constants": "original"},
    "BC, decaying": {"network": "lenet5", "master_decay": 0.9, "norm": "none"},
    "general": {"network": "lenet5", "clipping": "general", "sets": 4},
    "IC": {"network": "convnet", "clipping": "individual"},
    "IC, group": {"network": "convnet", "clipping": "individual", "norm": "group"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_setting_runs_small(tmp_path: Path, monkeypatch, kind: str) -> None:
    """ε is that of the scheme, the multiplier and the steps that the run reports."""
    monkeypatch.setitem(SHAPES, "cifar10", (3, 16, 16))  # one image's own statistics need some room
    setting = Setting(sigma=4.0, **KINDS[kind])
    run = small(setting, tmp_path)
    assert run["steps"] == 4  # 64 of 70 records fill two batches of 32, twice
    if kind.startswith("IC"):
        scheme, unit = tacit.sampling.WithoutReplacement(64, 32), Unit.RECORD
    elif kind == "general":
        scheme, unit = (
            tacit.sampling.MiniSets(4, 16, chosen=2),
            Unit.MINI_SET,
        )  # --small: two sets a step
    else:
        scheme, unit = tacit.sampling.MiniSets(2, 32, chosen=1), Unit.MINI_SET
    blocks = {"BC, full gradient": 1, "BC, grouped": 3, "BC, decaying": 5}
    of_lenet, of_convnet = 8, 9
    usual = of_convnet if kind.startswith("IC") else of_lenet
    assert run["blocks"] == blocks.get(kind, usual)
    one = kind in ("BC, full gradient", "BC, factors")
    z = 4.0 if one else 4.0 / math.sqrt(run["blocks"])
    assert run["noise_multiplier"] == pytest.approx(z)
    assert run["sampling"] == scheme.describe()
    exact = tacit.epsilon(z, scheme, 4, delta=1e-5, relation=tacit.Relation.REPLACE_ONE, unit=unit)
    assert run["epsilon"] == pytest.approx(exact, rel=1e-9)


def test_figure_1_draws_the_layers_norms(tmp_path: Path) -> None:
    arguments = ["1", "--small", "--device", "cpu", "--evaluations", "1", "--out", str(tmp_path)]
    (row,) = runner.main(PAPER, arguments)["1"]["settings"].values()
    (run,) = row["runs"]
    assert run["epsilon"] == "inf"
    assert len(run["layers"]) == 62
    kinds = [layer_kind(n, i, 62) for i, n in enumerate(run["layers"])]
    assert kinds.count("linear") == 2
    assert kinds.count("conv") == 17  # one first, and two in each of eight blocks
    assert (tmp_path / "small_figure_1.png").read_bytes().startswith(b"\x89PNG")


def test_recorded_figures_can_be_drawn_again(tmp_path: Path) -> None:
    records = Path(__file__).parents[2] / "benchmarks" / "records"
    folder = records / "2026-11-15_batch_clipping_figures"
    arguments = ["1", "4", "--plot-only", str(folder), "--out", str(tmp_path)]
    assert list(runner.main(PAPER, arguments)) == ["1", "4"]
    assert len(list(tmp_path.glob("figure_*.png"))) == 2


@pytest.mark.parametrize(("sigma", "exact"), [(2.5, 2.08), (1.5, 9.70)])
def test_the_papers_lenet5_has_the_epsilon_of_the_record(sigma, exact) -> None:
    """50 epochs of sets of 64 out of 54,000 records, eight layers, from the numbers of `run`."""
    setting = Setting("lenet5", master=0.2, sigma=sigma)
    private = tacit.Records(torch.zeros(54_000, 1), public_size=54_000)
    model, steps = training.network(setting), 50 * (54_000 // 64)
    sampler = training.sampler_of(setting, training.whole_batches(private, 64), steps)
    blocks = len(training.layers(setting)(model))
    assert blocks == 8
    z = training.joint_multiplier(setting, blocks)
    plan = tacit.accounting.Plan(sampler.scheme, z, tacit.Relation.REPLACE_ONE, steps, setting.unit)
    assert plan.epsilon(steps, results.DELTA) == pytest.approx(exact, rel=0.005)


def test_batch_norm_on_one_image_is_instance_norm() -> None:
    """Why individual clipping is built with InstanceNorm: outputs and all gradients agree."""
    torch.manual_seed(0)
    batch = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 4))
    alone = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.Flatten(), nn.Linear(48, 4)
    )
    with torch.no_grad():
        batch[1].weight.copy_(torch.rand(3) + 0.5)
        batch[1].bias.copy_(torch.randn(3))
    alone.load_state_dict(
        {n: t for n, t in batch.state_dict().items() if "running" not in n and "num_b" not in n}
    )
    x, y = torch.randn(5, 2, 6, 6), torch.tensor([0, 1, 2, 3, 0])
    loss = tacit.losses.CrossEntropy()
    together = losses_of(loss, alone(x), y)
    for i in range(5):
        one = slice(i, i + 1)
        mine = losses_of(loss, batch(x[one]), y[one]).sum()
        theirs = together[i]
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
        found = torch.autograd.grad(mine, list(batch.parameters()))
        wanted = torch.autograd.grad(theirs, list(alone.parameters()), retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    several = losses_of(loss, batch(x), y)
    assert not torch.allclose(several, together, rtol=1e-2)  # with company it is another thing


def test_all_covers_every_figure() -> None:
    assert {selection.figure for selection in EVERYTHING} == set(FIGURES)
    for selection in EVERYTHING:
        assert runner.matching(FIGURES[selection.figure].settings, selection.only)


def test_beyond_runs_the_rates_that_its_search_found_best(tmp_path, monkeypatch) -> None:
    method = "sets of 8, BatchNorm, factors"
    monkeypatch.setattr(beyond, "noise_for", lambda *_: 1.0)
    shared = ["beyond", "--small", "--device", "cpu", "--out", str(tmp_path)]
    shared += ["--networks", "lenet5", "--methods", method, "--epsilons", "3"]
    found = runner.main(PAPER, [*shared, "--search"])["search"]["settings"]
    assert len(found) == len(beyond.METHODS[method][2])
    scores = {
        row["setting"]["learning_rate"]: row["runs"][0]["public_accuracy"] for row in found.values()
    }
    search = tmp_path / "small_search.json"
    (rate,) = beyond.best_rates(search).values()
    assert scores[rate] == max(scores.values())
    final = runner.main(PAPER, [*shared, "--seeds", "1", "2", "--chosen", str(search)])
    (row,) = final["beyond"]["settings"].values()
    assert row["setting"]["learning_rate"] == rate
    assert [one["seed"] for one in row["runs"]] == [1, 2]
