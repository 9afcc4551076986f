"""Losing Less: recipes and their noise, every figure small, and what a run is told reaches it."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import dp_accounting
import pytest
import torch

import tacit
from tacit.accounting.pld import gaussian_epsilon

FOLDER = Path(__file__).parents[2] / "experiments" / "losing_less"
STEMS = [path.stem for path in FOLDER.glob("*.py")]
CURVES = ["figure_3", "figure_4", "figure_9", "figure_10", "figure_15", "table_6"]
INSIDE = [f"figure_{number}" for number in (1, 2, 5, 6, 7, 11, 12, 14)]
SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
Folder = Callable[[str], ModuleType]


def some_records(count: int, shape: tuple[int, ...]) -> tacit.Records:
    generator = torch.Generator().manual_seed(count)
    targets = torch.randint(10, (count,), generator=generator)
    inputs = torch.rand(count, *shape, generator=generator)
    inputs[:, :, :8, :8] += 4 * (targets % 2)[:, None, None, None]
    return tacit.Records(inputs, targets, num_classes=10, public_size=count)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Folder]:
    """The folder's modules by name, on made-up records; other folders have the same names."""
    before = {stem: sys.modules.pop(stem) for stem in STEMS if stem in sys.modules}
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()

    def load(name: str, **_: object) -> tuple[tacit.Records, tacit.Records]:
        return some_records(96, SHAPES[name]), some_records(20, SHAPES[name])

    monkeypatch.setattr(tacit, "load", load)
    yield importlib.import_module
    torch.set_num_threads(threads)
    for stem in STEMS:
        sys.modules.pop(stem, None)
    sys.modules.update(before)


@pytest.mark.parametrize(
    ("dataset", "paper", "ours"),
    [("cifar10", 1.54, 1.3215), ("fashion-mnist", 2.15, 1.8083), ("mnist", 1.23, 1.0682)],
)
def test_pld_allows_less_noise_at_the_same_epsilon(
    folder: Folder, dataset: str, paper: float, ours: float
) -> None:
    recipes = folder("recipes")
    recipe = recipes.RECIPES[dataset, "pixels"]
    assert recipe.noise_multiplier == paper
    around = [
        tacit.epsilon(z, recipe.sampling, recipe.steps, delta=recipes.DELTA)
        for z in (ours - 0.001, ours + 0.001)
    ]
    assert around[0] > 3 > around[1]


def test_the_calibrated_noise_is_the_least(folder: Folder) -> None:
    recipes = folder("recipes")
    recipe = recipes.RECIPES["cifar10", "scattering"]
    z = recipes.pld_noise(recipe)
    assert z == pytest.approx(4.48, abs=0.005)
    assert 2.99 < tacit.epsilon(z, recipe.sampling, recipe.steps, delta=recipes.DELTA) <= 3.0


def test_a_shuffled_epoch_of_one_batch_is_a_gaussian(folder: Folder) -> None:
    """With T = 1 nothing is hidden: the attack must find the Gaussian's ε, and no more."""
    exact = gaussian_epsilon(3.0 / 2, 1e-5)
    found = folder("shuffled").shuffled_epsilon(3.0, 1, 4, 1e-5)
    assert 0.995 * exact < found <= exact


@pytest.mark.parametrize(
    ("dataset", "least"), [("cifar10", 5.3), ("fashion-mnist", 3.2), ("mnist", 8.2)]
)
def test_shuffled_the_papers_runs_leak_more_than_poisson(
    folder: Folder, dataset: str, least: float
) -> None:
    """ε of about 2.4 is what Poisson sampling has; from above no amplification bounds it."""
    recipes = folder("recipes")
    recipe = recipes.RECIPES[dataset, "pixels"]
    z, T = recipe.noise_multiplier, recipes.SIZES[dataset] // recipe.batch_size
    found = folder("shuffled").shuffled_epsilon(z, T, recipe.epochs, 1e-5)
    assert found == pytest.approx(least, abs=0.05)
    assert 3 < found < gaussian_epsilon(z / math.sqrt(recipe.epochs), 1e-5)


def test_table_5_says_all_of_it(folder: Folder, monkeypatch, tmp_path: Path) -> None:
    module, key = folder("table_5"), ("cifar10", "scattering")
    monkeypatch.setattr(module, "RECIPES", {key: module.RECIPES[key]})
    (row,) = module.main(["--out", str(tmp_path / "t.json")])
    assert row["epsilon"] == pytest.approx(2.28, abs=0.01)
    assert row["epsilon"] < row["epsilon by RDP"] < 3
    assert row["shuffled"] < row["no amplification"]
    assert json.loads((tmp_path / "t.json").read_text())["rows"] == [row]


def test_one_file_a_figure() -> None:
    figures = {stem for stem in STEMS if stem.startswith("figure_")}
    assert figures == {f"figure_{number}" for number in range(1, 16)}


@pytest.mark.parametrize("name", [*CURVES, *INSIDE])
def test_every_figure_lists_settings(folder: Folder, name: str) -> None:
    module, runs = folder(name), folder("runs")
    assert module.SETTINGS
    for setting in module.SETTINGS.values():
        assert isinstance(setting, runs.Setting)
        runs.loss_of(setting)
    assert f"experiments/losing_less/{name}.py" in module.__doc__
    number = name.rpartition("_")[2]
    assert module.__doc__.startswith((f"Figure {number}:", f"Tables {number} "))


CHEAP = {
    "figure_3": ["MNIST, tailored, pld noise"],
    "figure_4": ["MNIST, cross-entropy, paper noise"],
    "figure_9": ["MNIST, pixels, sse+ce", "MNIST, pixels, tailored"],
    "figure_10": ["MNIST, beta 11"],
    "figure_15": ["MNIST, sae", "MNIST, huber:0.3"],
}


@pytest.mark.parametrize("name", CHEAP)
def test_a_curve_runs_small(folder: Folder, name: str, tmp_path: Path) -> None:
    """ε is that of the small run itself, and JSON and picture are written."""
    module, out = folder(name), tmp_path / "found.json"
    arguments = ["--small", "--device", "cpu", "--evaluations", "3", "--seeds", "0", "1"]
    arguments += ["--out", str(out), "--plot", str(tmp_path / "p.png"), "--only", *CHEAP[name]]
    draw = {"draw": module.draw} if hasattr(module, "draw") else {}
    found = folder("figure").main("small", module.SETTINGS, arguments, **draw)
    assert list(tmp_path.glob("p*.png"))
    written = json.loads(out.read_text())
    assert "torch" in written["environment"]
    for only in CHEAP[name]:
        row = found["settings"][only]
        assert row["min"] <= row["median"] <= row["max"]
        assert [r["seed"] for r in row["runs"]] == [0, 1]
        assert written["settings"][only]["median"] == row["median"]
        for run in row["runs"]:
            assert [p["step"] for p in run["path"]] == [1, 2, 3]
            exact = tacit.epsilon(
                run["noise_multiplier"], tacit.sampling.Poisson(16 / 96), 3, delta=1e-5
            )
            assert run["epsilon"] == pytest.approx(exact, rel=1e-6)
            assert run["epsilon"] <= 3
            assert [p["epsilon"] for p in run["path"]] == sorted(p["epsilon"] for p in run["path"])


@pytest.mark.parametrize("name", ["figure_2", "figure_5", "figure_7", "figure_14"])
def test_a_look_inside_runs_small(
    folder: Folder, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = folder(name)
    if name == "figure_2":
        few = functools.partial(tacit.diagnostics.Curvature, iterations=3, max_records=16)
        monkeypatch.setattr(module, "WATCHERS", {"curvature": few})
    dataset = "fashion-mnist" if name == "figure_5" else "mnist"
    names = [n for n in module.SETTINGS if n.startswith(f"{dataset},")]
    assert len(names) == 2
    found = getattr(module, name)(
        ["--small", "--device", "cpu", "--out", str(tmp_path / "f.json"),
         "--plot", str(tmp_path / "p.png"), "--only", *names]
    )  # fmt: skip
    pictures = {p.name for p in tmp_path.glob("p_*.png")}
    assert pictures == {f"p_{dataset}_{kind}.png" for kind in module.WATCHERS}
    for own in found["settings"].values():
        for kind in module.WATCHERS:
            points = own[0]["seen"][kind]
            assert points[0]["step"] == 0
            assert points[-1]["step"] in (0, 3)  # every 5th step has none of three
            assert points[0]["value"]
    json.loads((tmp_path / "f.json").read_text())


def test_confusion_with_and_without_privacy(folder: Folder, tmp_path: Path) -> None:
    found = folder("confusions").main(
        "small", ("mnist",), (2,), ["--small", "--device", "cpu", "--plot", str(tmp_path / "p.png")]
    )
    kinds = found["settings"]["mnist, epoch 2"]
    assert set(kinds) == {"tailored", "cross-entropy", "SGD, not private"}
    assert kinds["SGD, not private"]["epsilon"] == math.inf
    assert sum(map(sum, kinds["tailored"]["seen"])) == 96
    assert (tmp_path / "p_mnist_2.png").exists()
    for name in ("figure_8", "figure_13"):
        assert "cifar10" in folder(name).DATASETS


def test_the_schedule_reaches_the_loss(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """α of each step is that of the epoch, by the recipe's threshold."""
    runs, seen = folder("runs"), []
    per_record = tacit.losses.TailoredLoss.per_record

    def watched(self, outputs, targets):
        seen.append((self.epoch, self.alpha, self.threshold_epoch, self.beta, self.gamma))
        return per_record(self, outputs, targets)

    monkeypatch.setattr(tacit.losses.TailoredLoss, "per_record", watched)
    setting = runs.paper_setting("mnist", "scattering", "tailored")
    runs.run(replace(setting, batch_size=48, steps=4, noise_multiplier=None), 0, "cpu", 1)
    epochs = sorted({row[0] for row in seen})
    assert epochs == [0.0, 0.5, 1.0, 1.5]
    for epoch, alpha, threshold, beta, gamma in seen:
        assert (threshold, beta, gamma) == (2, 11, 10)
        assert alpha == pytest.approx(1 / (1 + math.exp(2 - epoch)))


@pytest.mark.parametrize(
    "released", [{"centre": 4.0}, {"channels": 4.0}, {"centre": 6.0, "channels": 5.0}]
)
def test_what_is_released_first_is_paid_for(released: dict, folder: Folder) -> None:
    runs = folder("runs")
    setting = runs.Setting("mnist", "raw", network="linear", batch_size=24, steps=3)
    found = runs.run(replace(setting, **released), 0, "cpu", 1, held_out=True)
    events = tuple(dp_accounting.GaussianDpEvent(z) for z in released.values())
    rate = tacit.sampling.Poisson(24 / 77)  # 96 records, of which 19 are held out
    exact = tacit.epsilon(found["noise_multiplier"], rate, 3, delta=1e-5, prelude=events)
    assert found["epsilon"] == pytest.approx(exact, rel=1e-6)
    bare = runs.run(setting, 0, "cpu", 1, held_out=True)
    assert bare["noise_multiplier"] < found["noise_multiplier"]


def test_the_ball_holds_the_weights(folder: Folder) -> None:
    """With noise that carries a free layer far out, the other keeps a spectral norm of 1."""
    runs = folder("runs")
    base = runs.Setting("mnist", "first", network="ball", batch_size=24, steps=3)
    norms = {}
    for network in ("ball", "linear"):
        setting = replace(base, network=network, max_norm=5.0, learning_rate=5.0)
        found = runs.run(setting, 0, "cpu", 1, look=lambda model, _: spectral_norm(model))
        norms[network] = found["seen"]
    assert 0.99 < norms["ball"] <= 1
    assert norms["linear"] > 2


def spectral_norm(model: torch.nn.Module) -> float:
    return float(torch.linalg.matrix_norm(model[1].weight.detach(), 2))


def test_searching_looks_at_held_out_records_only(folder: Folder, tmp_path: Path) -> None:
    beyond, out = folder("beyond"), tmp_path / "search.jsonl"
    only = ["mnist/linear", "fashion-mnist/linear"]
    arguments = ["--small", "--device", "cpu", "--only", *only, "--out", str(out)]
    for features in beyond.SPACES["linear"]["features"]:
        test = folder("runs").data("mnist", features, "cpu", 96)[1]
        test.targets.fill_(11)  # no class: whoever looks at the test records finds nothing right
    found = beyond.main([*arguments, "--search", "--trials", "4"])
    assert [line["method"] for line in found] == only * 4  # they take turns
    assert all(line["held_out"] and "error" not in line for line in found)
    assert max(line["accuracy"] for line in found if line["method"] == only[0]) > 0
    with out.open("a") as file:
        file.write('{"method": "mnist/lin')  # killed while it wrote
    final = tmp_path / "final.jsonl"
    arguments = ["--small", "--device", "cpu", "--only", only[0], "--seeds", "3", "4"]
    lines = beyond.main([*arguments, "--chosen", str(out), "--out", str(final)])
    assert [line["accuracy"] for line in lines] == [0, 0]
    best = beyond.best_of(found)[only[0]][1]
    for line in lines:
        assert line["setting"]["temperature"] == best.temperature
    assert len(final.read_text().splitlines()) == 2


def test_a_run_that_fails_is_written_down_and_the_others_go_on(folder: Folder) -> None:
    side = folder("side_by_side")
    jobs = [side.Job(name, folder("runs").Setting(), 0) for name in "abc"]

    def work(job):
        if job.method == "b":
            raise RuntimeError("out of memory")
        return {"accuracy": 1.0}

    found = list(side.each_result(work, jobs, (), 1, math.inf))
    assert [job.method for job, _ in found] == ["a", "b", "c"]
    assert "out of memory" in found[1][1]["error"]
    assert found[2][1] == {"accuracy": 1.0}
    assert not list(side.each_result(work, jobs, (), 1, time.perf_counter()))


def test_time_to_a_target(folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = folder("time_to")
    arguments = ["--small", "--device", "cpu", "--threads", "1", "--seeds", "0", "1",
                 "--out", str(tmp_path / "t.json"), "--only"]  # fmt: skip
    calls = []

    def counted(*given, **more):
        calls.append(given)
        return 10.0

    monkeypatch.setattr(tacit, "calibrate", counted)
    targets = {
        "low": (0.0, module.TARGETS["mnist 97"][1]),
        "high": (1.1, module.TARGETS["mnist 97"][1]),
    }
    monkeypatch.setattr(module, "TARGETS", targets)
    searched = replace(targets["low"][1], temperature=0.5)
    line = {"method": "m", "held_out": True, "accuracy": 0.9, "setting": asdict(searched)}
    (tmp_path / "search.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(module, "METHOD_OF", {"high": "m"})
    report = module.main([*arguments, "low", "high", "--chosen", str(tmp_path / "search.jsonl")])[
        "targets"
    ]
    temperatures = [report[name]["setting"]["temperature"] for name in ("low", "high")]
    assert temperatures == [targets["low"][1].temperature, 0.5]
    # Every seed of every target calibrates within its own time, also at a setting met before.
    assert len(calls) == 4
    for row in (row for target in report.values() for row in target["runs"]):
        assert 0 < row["calibration"] < row["path"][0]["seconds"]
    assert report["low"]["reached"] == "2 of 2"
    assert 0 < report["low"]["median seconds"] < report["low"]["with features"]
    assert report["low"]["median seconds"] <= max(r["whole"] for r in report["low"]["runs"])
    assert report["high"]["reached"] == "0 of 2"
    assert report["high"]["with features"] is None


def test_a_wrong_name_is_refused(folder: Folder, capsys: pytest.CaptureFixture) -> None:
    runs = folder("runs")
    with pytest.raises(SystemExit):
        folder("figure").main("x", {"a": runs.Setting()}, ["--only", "b", "--small"])
    assert "no settings ['b']; there are ['a']" in capsys.readouterr().err
    with pytest.raises(ValueError, match="give one of cross-entropy"):
        runs.loss_of(runs.Setting(loss="hinge"))


def test_everything_goes_on_where_it_was_stopped(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    everything, out = folder("everything"), tmp_path / "runs.jsonl"
    every = everything.in_order()
    assert {job.method.partition(":")[0] for job in every} == {"3", "4", "9", "10", "15"}
    names = ("3: MNIST, without privacy", "3: MNIST, tailored, pld noise")
    jobs = [job for job in every if job.method in names][:3]
    monkeypatch.setattr(everything, "in_order", lambda: jobs)
    arguments = ["--small", "--device", "cpu", "--out", str(out)]
    everything.main(arguments)
    lines = out.read_text().splitlines()
    assert len(lines) == 3
    everything.main(arguments)
    assert out.read_text().splitlines() == lines
    everything.main(["--out", str(out), "--tables", str(tmp_path / "tables")])
    table = json.loads((tmp_path / "tables" / "figure_3.json").read_text())
    assert len(table["settings"]) == 2


def test_copies_of_a_record_are_its_own(folder: Folder) -> None:
    """A row of the table depends on that record alone, and views are drawn from its row."""
    runs, copies = folder("runs"), folder("feature_copies")
    place = ("fashion-mnist", "scattering", "cpu", 40, False)
    table = runs.copies_of(*place, 3)
    assert table.shape[:2] == (40, 3)
    train, _ = runs.data(*place[:4])
    assert torch.allclose(table[:, 0].float(), train.inputs, atol=1e-2)
    assert not torch.allclose(table[:, 1], table[:, 0])
    numbers = copies.numbered(train).inputs[[5, 5, 7]]
    drawn = copies.DrawnCopy(table)(numbers)
    for row, number in zip(drawn, (5, 5, 7), strict=True):
        assert any(torch.equal(row, copy.float()) for copy in table[number])
    setting = runs.Setting(
        "fashion-mnist", "scattering", loss="tailored", batch_size=16, steps=3, views=2, copies=3
    )
    found = runs.run(setting, 0, "cpu", 1, 96)
    assert found["epsilon"] <= 3
    centred = replace(setting, network="ball", loss="cross-entropy", centre=10.0)
    assert runs.run(centred, 0, "cpu", 1, 96)["epsilon"] <= 3


def test_two_copies_are_an_image_and_its_mirror_image(folder: Folder) -> None:
    copies, runs = folder("feature_copies"), folder("runs")
    train, _ = tacit.load("cifar10")
    table = copies.table_of(train, "cifar10", 2, lambda r: runs.featured(r, "pixels", "cpu"))
    assert torch.equal(table[:, 0], train.inputs.half())
    assert torch.equal(table[:, 1], train.inputs.flip(-1).half())


def test_five_copies_of_a_digit_are_itself_and_four_moved_by_a_pixel(folder: Folder) -> None:
    copies, runs = folder("feature_copies"), folder("runs")
    train, _ = tacit.load("mnist")
    table = copies.table_of(train, "mnist", 5, lambda r: runs.featured(r, "pixels", "cpu"))
    image = train.inputs.half()
    assert torch.equal(table[:, 0], image)
    assert torch.equal(table[:, 1, :, 1:], image[:, :, :-1])
    assert torch.equal(table[:, 4, :, :, :-1], image[:, :, :, 1:])


def test_as_many_views_as_copies_are_each_copy_once(folder: Folder) -> None:
    """Whichever records a batch has: a record's views do not depend on the others."""
    copies = folder("feature_copies")
    table = torch.arange(24.0).reshape(4, 3, 2)
    views = tacit.data.Augmentation(3, copies.EveryCopy(table)).views_of
    for rows in ([0, 1, 2, 3], [2, 0], [3]):
        assert torch.equal(views(torch.tensor(rows)[:, None]), table[rows].flatten(0, 1))


@pytest.mark.parametrize(("steps", "evaluations"), [(10, 3), (366, 20), (3, 10), (100, 1)])
def test_looks_are_even_and_end_with_the_last_step(
    folder: Folder, steps: int, evaluations: int
) -> None:
    looks = sorted(folder("watch").looks_of(steps, evaluations))
    assert looks[-1] == steps
    assert looks[0] >= 1
    assert len(looks) == min(steps, evaluations)
    gaps = [b - a for a, b in itertools.pairwise(looks)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("held_out", [False, True])
def test_records_are_looked_at_both_ways(held_out: bool, folder: Folder) -> None:
    """The mirror images are those of the records looked at, in their order."""
    runs, watch = folder("runs"), folder("watch")
    place = ("cifar10", "pixels", "cpu", None, held_out)
    _, looked_at = runs.parts(*place)
    assert torch.equal(runs.mirrors_of(*place), looked_at.inputs.flip(-1))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    both = watch.accuracy(model, looked_at, looked_at.inputs.flip(-1))
    turned = replace(looked_at, inputs=looked_at.inputs.flip(-1))
    assert both == watch.accuracy(model, turned, looked_at.inputs)
    setting = runs.Setting("cifar10", batch_size=16, steps=2, learning_rate=0.1, both_ways=True)
    found = runs.run(setting, 0, "cpu", held_out=held_out)
    assert {"accuracy", "accuracy_one_way"} <= found.keys()


def test_orders_have_their_weights(folder: Folder) -> None:
    runs = folder("runs")
    _, test = tacit.load("cifar10")
    log, orders = (runs.featured(test, kind, "cpu").inputs for kind in ("log", "orders"))
    ratio = (orders / log).reshape(len(log), 3, 81, -1)
    for rows, weight in ((ratio[:, :, :1], 0.7), (ratio[:, :, 1:17], 1), (ratio[:, :, 17:], 1.4)):
        torch.testing.assert_close(rows, torch.full_like(rows, weight))


def test_mixed_features_have_their_shares_and_norm_one(folder: Folder) -> None:
    runs, mix = folder("runs"), folder("feature_mix")
    features = "mixed:scattering=0.5,log=0.3,pixels=0.2"
    train, _ = runs.data("mnist", features, "cpu", 40)
    widths = mix.widths_of(features, (1, 28, 28), lambda r, kind: runs.featured(r, kind, "cpu"))
    assert sum(widths) == train.inputs.shape[1]
    for part, share in zip(train.inputs.split(widths, dim=1), (0.5, 0.3, 0.2), strict=True):
        assert torch.allclose(part.square().sum(dim=1), torch.tensor(share), rtol=1e-4)
    setting = runs.Setting(
        "mnist", features, 10.0, "ball", temperature=0.01, batch_size=16, steps=3
    )
    centre, _ = runs._centre(setting, train, seed=0)
    for part, share in zip(centre(train.inputs).split(widths, dim=1), (0.5, 0.3, 0.2), strict=True):
        assert torch.allclose(part.square().sum(dim=1), torch.tensor(share), rtol=1e-4)
    assert runs.run(setting, 0, "cpu", 1, 96)["epsilon"] <= 3
    for wrong in ("mixed:log=0.5", "mixed:log=1.5,pixels=-0.5"):
        with pytest.raises(ValueError, match="sum of 1"):
            mix.shares_of(wrong)
