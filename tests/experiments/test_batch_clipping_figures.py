"""The batch-clipping figures: every file lists its settings, and every kind of setting runs."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import tacit
from tacit.losses.per_record import losses_of
from tacit.sampling.scheme import Unit

FOLDER = Path(__file__).parents[2] / "experiments" / "batch_clipping"
FIGURES = [f"figure_{number}" for number in range(1, 19)]
# Small images where the network is large: resnet-18 and convnet take any.
SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 8, 8)}


def some_records(count: int, shape: tuple[int, ...]) -> tacit.Records:
    generator = torch.Generator().manual_seed(count)
    targets = torch.randint(10, (count,), generator=generator)
    # Whether a corner is bright tells a record's parity, so that there is something to learn.
    inputs = torch.randn(count, *shape, generator=generator)
    inputs[:, :, :2, :2] += 4 * (targets % 2)[:, None, None, None]
    return tacit.Records(
        inputs, targets, num_classes=10, public_size=count, name=f"{count} made up"
    )


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch):
    """The modules of the folder, by name, on made-up records in the place of the real ones."""
    monkeypatch.syspath_prepend(str(FOLDER))
    runs = importlib.import_module("runs")

    def data(name: str, device: str, limit: int | None):
        public, private, test = (some_records(count, SHAPES[name]) for count in (40, 70, 16))
        return public, private, test

    monkeypatch.setattr(runs, "data", data)
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_lists_settings_that_can_be_built(folder, name: str) -> None:
    module, runs = folder(name), folder("runs")
    assert module.SETTINGS
    for setting in module.SETTINGS.values():
        assert isinstance(setting, runs.Setting)
        assert setting.clipping in ("none", "batch", "individual", "general")
        assert setting.batch_size % setting.set_size == 0
        assert setting.network in runs.DATA
    assert module.__doc__.startswith(f"Figure {name.rpartition('_')[2]}:")
    assert f"experiments/batch_clipping/{name}.py" in module.__doc__


def test_one_file_a_figure() -> None:
    assert {p.stem for p in FOLDER.glob("figure_*.py")} == set(FIGURES)


def small(folder, setting, tmp_path: Path, *arguments: str) -> dict:
    out, picture = tmp_path / "found.json", tmp_path / "found.png"
    found = folder("figure").main(
        "a rehearsal", {"it": setting}, ["--small", "--device", "cpu", "--evaluations", "2",
                                         "--out", str(out), "--plot", str(picture), *arguments]
    )  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = json.loads(out.read_text())
    assert written["settings"]["it"]["mean"] == found["settings"]["it"]["mean"]
    assert "torch" in written["environment"]
    (run,) = found["settings"]["it"]["runs"]
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
def test_each_kind_of_setting_runs_small(folder, tmp_path: Path, monkeypatch, kind: str) -> None:
    """ε is that of the scheme, the multiplier and the steps that the run reports."""
    monkeypatch.setitem(SHAPES, "cifar10", (3, 16, 16))  # one image's own statistics need some room
    setting = folder("runs").Setting(sigma=4.0, **KINDS[kind])
    run = small(folder, setting, tmp_path)
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


def test_figure_1_draws_the_layers_norms(folder, tmp_path: Path) -> None:
    module = folder("figure_1")
    (setting,) = module.SETTINGS.values()
    run = small(folder, setting, tmp_path, "--epochs", "1", "--evaluations", "1")
    assert run["epsilon"] == math.inf
    assert len(run["layers"]) == 62
    kinds = [module.kind_of(n, i, 62) for i, n in enumerate(run["layers"])]
    counts = {kind: kinds.count(kind) for kind in set(kinds)}
    assert counts["linear"] == 2
    assert counts["conv"] == 17  # one first, and two in each of eight blocks
    found = {"title": "norms", "settings": {"SGD": {"runs": [run]}}}
    module.plot(found, tmp_path / "norms.png")
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_name_is_refused(folder, tmp_path: Path, capsys) -> None:
    main, setting = folder("figure").main, folder("runs").Setting("lenet5")
    with pytest.raises(SystemExit):
        main("x", {"a": setting}, ["--only", "b", "--small"])
    assert "no settings ['b']; there are ['a']" in capsys.readouterr().err


@pytest.mark.parametrize(("sigma", "exact"), [(2.5, 2.08), (1.5, 9.70)])
def test_the_papers_lenet5_has_the_epsilon_of_the_record(folder, sigma, exact) -> None:
    """50 epochs of sets of 64 out of 54,000 records, eight layers, from the numbers of `run`."""
    runs = folder("runs")
    setting = runs.Setting("lenet5", master=0.2, sigma=sigma)
    private = tacit.Records(torch.zeros(54_000, 1), torch.zeros(54_000).long())
    scheme, per_epoch = runs.scheme_of(setting, private)
    model = runs.network(setting)
    count = len(runs.probe_of(setting, model, runs.layers(setting)).blocks_of(model))
    assert count == 8
    z = runs.joint_multiplier(setting, count)
    plan = tacit.accounting.Plan(
        scheme, z, tacit.Relation.REPLACE_ONE, round(50 * per_epoch), Unit.MINI_SET
    )
    assert plan.epsilon(plan.steps, runs.DELTA) == pytest.approx(exact, rel=0.005)


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


def test_everything_goes_on_where_it_was_stopped(folder, tmp_path, monkeypatch, capsys) -> None:
    everything = folder("everything")
    jobs = [job for job in everything.in_order() if job.group == "figure_12"][:2]
    monkeypatch.setattr(everything, "in_order", lambda: jobs)
    first = everything.main(["--out", str(tmp_path), "--small", "--workers", "1"])
    assert len(first["figure_12"]["settings"]) == len({job.name for job in jobs})
    assert (tmp_path / "figure_12.json").exists()
    capsys.readouterr()
    monkeypatch.setattr(everything, "run", None)  # nothing is left to run
    again = everything.main(["--out", str(tmp_path), "--small", "--workers", "1"])
    assert again == first
    assert "failed" not in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "evaluations"), [(2812, 5), (3, 20), (1, 1), (50, 50)])
def test_looks_are_even_and_end_with_the_last_step(folder, steps: int, evaluations: int) -> None:
    looks = sorted(folder("runs").looks_of(steps, evaluations))
    assert looks[-1] == steps
    assert looks[0] >= 1
    assert len(looks) == min(steps, evaluations)


def test_a_whole_run_and_a_reduced_one_are_two_files(folder) -> None:
    files = [job.file for job in folder("everything").in_order()]
    assert len(set(files)) == len(files)


def test_everything_starts_nothing_when_the_time_is_up(folder, tmp_path, capsys) -> None:
    everything = folder("everything")
    found = everything.main(
        ["--out", str(tmp_path), "--small", "--workers", "1", "--seconds", "-1", "--figures", "14"]
    )
    assert found == {}
    assert "the time is up" in capsys.readouterr().out


def test_everything_names_settings_that_there_are_and_covers_all_figures(folder) -> None:
    jobs = folder("everything").in_order()
    assert {job.group for job in jobs} == {f"figure_{number}" for number in range(1, 19)}
    assert len({(job.file, job.setting.epochs) for job in jobs}) == len(jobs)


def test_beyond_runs_the_rates_that_its_search_found_best(folder, tmp_path, monkeypatch) -> None:
    beyond = folder("beyond")
    method = "sets of 8, BatchNorm, factors"
    monkeypatch.setattr(beyond, "METHODS", {method: beyond.METHODS[method]})
    monkeypatch.setattr(beyond, "noise_for", lambda *_: 1.0)
    shared = ["--small", "--workers", "1", "--device", "cpu", "--out", str(tmp_path)]
    shared += ["--networks", "lenet5", "--epsilons", "3"]
    found = beyond.main([*shared, "--search"])["search"]["settings"]
    assert len(found) == len(beyond.METHODS[method][2])
    scores = {
        row["setting"]["learning_rate"]: row["runs"][0]["public_accuracy"] for row in found.values()
    }
    chosen = beyond.best_rates(tmp_path / "search.json")
    (rate,) = chosen.values()
    assert scores[rate] == max(scores.values())
    final = beyond.main([*shared, "--seeds", "1", "2", "--chosen", str(tmp_path / "search.json")])
    (row,) = final["beyond"]["settings"].values()
    assert row["setting"]["learning_rate"] == rate
    assert [one["seed"] for one in row["runs"]] == [1, 2]
