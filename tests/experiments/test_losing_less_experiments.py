"""Losing Less: recipes and their noise, every figure small, and what a run is told reaches it."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import dp_accounting
import pytest
import torch

import tacit
from experiments import images, results, runner
from experiments.losing_less import beyond, features, measures, recipes, training
from experiments.losing_less.__main__ import EVERYTHING, FIGURES, PAPER
from experiments.losing_less.recipes import paper_setting
from experiments.losing_less.training import Setting
from experiments.runner import Job
from tacit.accounting.pld import gaussian_epsilon

CURVES = ["3", "4", "9", "10", "15", "table_6"]
INSIDE = ["1", "2", "5", "6", "7", "8", "11", "12", "13", "14"]
SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
SMALL = ["--small", "--device", "cpu"]


def run(setting: Setting, evaluations: int = 1, **more: object) -> dict:
    return training.run(Job("0", "it", setting, 0, evaluations=evaluations, **more))[0]


@pytest.fixture(autouse=True)
def made_up_records(made_up, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))

    def load(name: str, **_: object) -> tuple[tacit.Records, tacit.Records]:
        return made_up(96, SHAPES[name]), made_up(20, SHAPES[name])

    monkeypatch.setattr(tacit, "load", load)
    caches = (images.parts, training.copies_of, training.mirrors_of)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("dataset", "features", "paper", "least"),
    [
        ("cifar10", "pixels", 1.54, 1.3215),
        ("fashion-mnist", "pixels", 2.15, 1.8083),
        ("mnist", "pixels", 1.23, 1.0682),
        ("cifar10", "scattering", 5.67, 4.48),
    ],
)
def test_pld_allows_less_noise_at_the_same_epsilon(dataset, features, paper, least) -> None:
    recipe = recipes.RECIPES[dataset, features]
    assert recipe.noise_multiplier == paper
    z = recipes.pld_noise(recipe)
    assert z == pytest.approx(least, abs=0.005)
    spent = [
        tacit.epsilon(noise, recipes.sampling_of(recipe), recipe.steps, delta=results.DELTA)
        for noise in (z, 0.999 * z)
    ]
    assert spent[0] <= 3 < spent[1]


def test_a_shuffled_epoch_of_one_batch_is_a_gaussian() -> None:
    """With T = 1 nothing is hidden: the attack must find the Gaussian's ε, and no more."""
    exact = gaussian_epsilon(3.0 / 2, 1e-5)
    found = recipes.shuffled_epsilon(3.0, 1, 4, 1e-5)
    assert 0.995 * exact < found <= exact


@pytest.mark.parametrize(
    ("dataset", "least"), [("cifar10", 5.3), ("fashion-mnist", 3.2), ("mnist", 8.2)]
)
def test_shuffled_the_papers_runs_leak_more_than_poisson(dataset: str, least: float) -> None:
    """ε of about 2.4 is what Poisson sampling has; from above no amplification bounds it."""
    recipe = recipes.RECIPES[dataset, "pixels"]
    epochs = recipes.epochs_of(recipe)
    z, T = recipe.noise_multiplier, recipes.SIZES[dataset] // recipe.batch_size
    found = recipes.shuffled_epsilon(z, T, epochs, 1e-5)
    assert found == pytest.approx(least, abs=0.05)
    assert 3 < found < gaussian_epsilon(z / math.sqrt(epochs), 1e-5)


def test_table_5_says_all_of_it(monkeypatch, tmp_path: Path) -> None:
    key = ("cifar10", "scattering")
    monkeypatch.setattr(recipes, "RECIPES", {key: recipes.RECIPES[key]})
    (row,) = runner.main(PAPER, ["table_5", "--out", str(tmp_path)])
    assert row["epsilon"] == pytest.approx(2.28, abs=0.01)
    assert row["epsilon"] < row["epsilon by RDP"] < 3
    assert row["shuffled"] < row["no amplification"]
    assert json.loads((tmp_path / "table_5.json").read_text())["rows"] == [row]


def test_there_is_every_figure() -> None:
    assert set(FIGURES) == {*map(str, range(1, 16)), "table_6"}
    assert set(CURVES) | set(INSIDE) == set(FIGURES)


@pytest.mark.parametrize("key", FIGURES)
def test_every_figure_lists_settings(key: str) -> None:
    assert FIGURES[key].settings
    for setting in FIGURES[key].settings.values():
        assert isinstance(setting, Setting)
        training.loss_of(setting)
    assert FIGURES[key].title.startswith((f"Figure {key}:", "Tables 6 "))
    assert set(FIGURES[key].measures) <= set(measures.DIAGNOSTICS)
    assert bool(FIGURES[key].measures) == (key in INSIDE)


CHEAP = {
    "3": ["MNIST, tailored, pld noise"],
    "4": ["MNIST, cross-entropy, paper noise"],
    "9": ["MNIST, pixels, sse+ce", "MNIST, pixels, tailored"],
    "10": ["MNIST, beta 11"],
    "15": ["MNIST, sae", "MNIST, huber:0.3"],
}


@pytest.mark.parametrize("key", CHEAP)
def test_a_curve_runs_small(key: str, tmp_path: Path) -> None:
    """ε is that of the small run itself; JSON and picture are written, and drawn again."""
    arguments = [*SMALL, "--evaluations", "3", "--seeds", "0", "1", "--out", str(tmp_path)]
    report = runner.main(PAPER, [key, *arguments, "--only", *CHEAP[key]])[key]
    written = json.loads((tmp_path / f"small_figure_{key}.json").read_text())
    assert "torch" in written["environment"]
    assert set(report["settings"]) == set(CHEAP[key])
    for only in CHEAP[key]:
        row = report["settings"][only]
        assert row["min"] <= row["median"] <= row["max"]
        assert [r["seed"] for r in row["runs"]] == [0, 1]
        assert written["settings"][only]["median"] == row["median"]
        for one in row["runs"]:
            assert [p["step"] for p in one["path"]] == [1, 2, 3]
            exact = tacit.epsilon(
                one["noise_multiplier"], tacit.sampling.Poisson(16 / 96), 3, delta=1e-5
            )
            assert one["epsilon"] == pytest.approx(exact, rel=1e-6)
            assert one["epsilon"] <= 3
            assert [p["epsilon"] for p in one["path"]] == sorted(p["epsilon"] for p in one["path"])
    pictures = set(tmp_path.glob("*.png"))
    assert pictures
    for picture in pictures:
        picture.unlink()
    runner.main(PAPER, [key, "--plot-only", str(tmp_path)])
    assert set(tmp_path.glob("*.png")) == pictures


@pytest.mark.parametrize("key", ["2", "5", "7", "14"])
def test_a_look_inside_runs_small(key: str, tmp_path: Path, monkeypatch) -> None:
    few = functools.partial(tacit.diagnostics.Curvature, iterations=3, max_records=16)
    monkeypatch.setitem(measures.DIAGNOSTICS, "curvature", few)
    dataset = "fashion-mnist" if key == "5" else "mnist"
    only = [f"{dataset}, cross-entropy", f"{dataset}, tailored"]
    report = runner.main(PAPER, [key, *SMALL, "--out", str(tmp_path), "--only", *only])[key]
    pictures = {p.name for p in tmp_path.glob("*.png")}
    names = [name.replace(" ", "_") for name in FIGURES[key].measures]
    assert pictures == {f"small_figure_{key}_{dataset}_{name}.png" for name in names}
    assert set(report["settings"]) == set(only)
    for row in report["settings"].values():
        for name in FIGURES[key].measures:
            points = row["runs"][0]["measured"][name]
            assert points[0]["step"] == 0
            assert points[-1]["step"] in (0, 3)  # no fifth step in three
            assert points[0]["value"]


def test_confusion_with_and_without_privacy(tmp_path: Path) -> None:
    only = [f"mnist, epoch 2, {kind}" for kind in ("tailored", "SGD not private")]
    report = runner.main(PAPER, ["13", *SMALL, "--out", str(tmp_path), "--only", *only])["13"]
    private, plain = (report["settings"][name]["runs"][0] for name in only)
    assert plain["epsilon"] == "inf"
    ((matrix,),) = (private["measured"]["confusion"],)
    assert sum(map(sum, matrix["value"])) == 96
    assert (tmp_path / "small_figure_13_mnist_epoch_2_confusion.png").exists()


def test_the_schedule_reaches_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """α of each step is that of the epoch, by the recipe's threshold."""
    seen = []
    per_record = tacit.losses.TailoredLoss.per_record

    def watched(self, outputs, targets):
        seen.append((self.epoch, self.alpha, self.threshold_epoch, self.beta, self.gamma))
        return per_record(self, outputs, targets)

    monkeypatch.setattr(tacit.losses.TailoredLoss, "per_record", watched)
    setting = paper_setting("mnist", "scattering", "tailored")
    run(replace(setting, batch_size=48, steps=4, noise_multiplier=None))
    epochs = sorted({row[0] for row in seen})
    assert epochs == [0.0, 0.5, 1.0, 1.5]
    for epoch, alpha, threshold, beta, gamma in seen:
        assert (threshold, beta, gamma) == (2, 11, 10)
        assert alpha == pytest.approx(1 / (1 + math.exp(2 - epoch)))


@pytest.mark.parametrize(
    "released", [{"centre": 4.0}, {"channels": 4.0}, {"centre": 6.0, "channels": 5.0}]
)
def test_what_is_released_first_is_paid_for(released: dict) -> None:
    setting = Setting("mnist", "raw", network="linear", batch_size=24, steps=3)
    found = run(replace(setting, **released), held_out=True)
    events = tuple(dp_accounting.GaussianDpEvent(z) for z in released.values())
    rate = tacit.sampling.Poisson(24 / 77)  # 96 records, of which 19 are held out
    exact = tacit.epsilon(found["noise_multiplier"], rate, 3, delta=1e-5, prelude=events)
    assert found["epsilon"] == pytest.approx(exact, rel=1e-6)
    bare = run(setting, held_out=True)
    assert bare["noise_multiplier"] < found["noise_multiplier"]


def test_the_ball_holds_the_weights() -> None:
    """With noise that carries a free layer far out, the other keeps a spectral norm of 1."""
    base = Setting("mnist", "first", network="ball", batch_size=24, steps=3)
    norms = {}
    for network in ("ball", "linear"):
        setting = replace(base, network=network, max_norm=5.0, learning_rate=5.0)
        _, model, _ = training.run(Job("0", network, setting, 0))
        norms[network] = spectral_norm(model)
    assert 0.99 < norms["ball"] <= 1
    assert norms["linear"] > 2


def spectral_norm(model: torch.nn.Module) -> float:
    return float(torch.linalg.matrix_norm(model[1].weight.detach(), 2))


def test_a_search_reads_held_out_records_only(tmp_path: Path, monkeypatch) -> None:
    only = ["mnist/linear", "fashion-mnist/linear"]
    load = tacit.load

    def without_test_classes(name: str, **more: object):
        train, test = load(name, **more)
        test.targets.fill_(11)  # no class: whoever reads the test records finds nothing right
        return train, test

    monkeypatch.setattr(tacit, "load", without_test_classes)
    arguments = ["beyond", *SMALL, "--out", str(tmp_path), "--only"]
    lines = runner.main(PAPER, [*arguments, *only, "--search", "--trials", "4"])
    assert [line["name"] for line in lines] == only * 4  # they take turns
    assert all(line["held_out"] and "error" not in line for line in lines)
    assert max(line["accuracy"] for line in lines if line["name"] == only[0]) > 0
    search = tmp_path / "search.jsonl"
    with search.open("a") as file:
        file.write('{"name": "mnist/lin')  # killed while it wrote
    seeds = ["--seeds", "3", "4", "--chosen", str(search)]
    row = runner.main(PAPER, [*arguments, only[0], *seeds])["beyond"]["settings"][only[0]]
    assert [one["accuracy"] for one in row["runs"]] == [0, 0]
    assert row["setting"]["temperature"] == beyond.TASKS.chosen(lines)[only[0]].temperature
    assert len((tmp_path / "small_runs.jsonl").read_text().splitlines()) == 2


def test_the_recorded_searches_can_be_read() -> None:
    records = Path(__file__).parents[2] / "benchmarks" / "records"
    lines = results.read_lines(records / "2026-11-15_losing_less_h200" / "search.jsonl")
    assert set() < set(beyond.TASKS.chosen(lines)) <= set(beyond.METHODS)


def test_time_to_a_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--small", "--device", "cpu", "--threads", "1", "--seeds", "0", "1",
                 "--out", str(tmp_path / "t.json"), "--only"]  # fmt: skip
    calls = []

    def counted(*given, **more):
        calls.append(given)
        return 10.0

    monkeypatch.setattr(tacit, "calibrate", counted)
    setting = beyond.TARGETS["mnist 97"][1]
    monkeypatch.setitem(beyond.TARGETS, "low", (0.0, setting))
    monkeypatch.setitem(beyond.TARGETS, "high", (1.1, setting))
    searched = replace(setting, temperature=0.5)
    line = {"method": "m", "held_out": True, "accuracy": 0.9, "setting": asdict(searched)}
    (tmp_path / "search.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(beyond, "METHOD_OF", {"high": "m"})
    chosen = ["--chosen", str(tmp_path / "search.jsonl")]
    report = runner.main(PAPER, ["time_to", *arguments, "low", "high", *chosen])["targets"]
    temperatures = [report[name]["setting"]["temperature"] for name in ("low", "high")]
    assert temperatures == [setting.temperature, 0.5]
    # Every seed of every target calibrates within its own time, also at a setting met before.
    assert len(calls) == 4
    for row in (row for target in report.values() for row in target["runs"]):
        assert 0 < row["calibration"] < row["path"][0]["seconds"]
    assert report["low"]["reached"] == "2 of 2"
    assert 0 < report["low"]["median seconds"] < report["low"]["with features"]
    assert report["low"]["median seconds"] <= max(r["whole"] for r in report["low"]["runs"])
    assert report["high"]["reached"] == "0 of 2"
    assert report["high"]["with features"] is None


def test_a_wrong_name_is_refused(capsys: pytest.CaptureFixture) -> None:
    for wrong, said in (
        (["3", "--only", "b"], "there is no setting 'b'; there are ['MNIST, cross-entropy"),
        (["99"], "there is no figure 99; there are 1, 2"),
        (["3", "--set", "rate=2"], "rate"),
    ):
        with pytest.raises(SystemExit):
            runner.main(PAPER, [*wrong, "--small"])
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="give one of cross-entropy"):
        training.loss_of(Setting(loss="hinge"))


def test_all_covers_the_curves() -> None:
    assert {selection.figure for selection in EVERYTHING} == {"3", "4", "9", "10", "15"}
    for selection in EVERYTHING:
        assert runner.matching(FIGURES[selection.figure].settings, selection.only)


def test_copies_of_a_record_are_its_own() -> None:
    """A row of the table depends on that record alone, and views are drawn from its row."""
    source = images.Source("fashion-mnist", "scattering", limit=40)
    table = training.copies_of(source, 3)
    assert table.shape[:2] == (40, 3)
    train, _ = images.parts(features.features_of, source)
    assert torch.allclose(table[:, 0].float(), train.inputs, atol=1e-2)
    assert not torch.allclose(table[:, 1], table[:, 0])
    numbers = features.numbered(train).inputs[[5, 5, 7]]
    drawn = features.CopyViews(table)(numbers)
    for row, number in zip(drawn, (5, 5, 7), strict=True):
        assert any(torch.equal(row, copy.float()) for copy in table[number])
    setting = Setting(
        "fashion-mnist", "scattering", loss="tailored", batch_size=16, steps=3, views=2, copies=3
    )
    found = run(setting, limit=96)
    assert found["epsilon"] <= 3
    centred = replace(setting, network="ball", loss="cross-entropy", centre=10.0)
    assert run(centred, limit=96)["epsilon"] <= 3


def test_copies_are_mirror_images_or_moved_by_a_pixel() -> None:
    """Two copies of a photograph, and five of a digit, are not drawn."""
    train, _ = tacit.load("cifar10")
    table = features.table_of(train, "cifar10", 2, lambda r: images.featured(r, "pixels", "cpu"))
    assert torch.equal(table[:, 0], train.inputs.half())
    assert torch.equal(table[:, 1], train.inputs.flip(-1).half())
    train, _ = tacit.load("mnist")
    table = features.table_of(train, "mnist", 5, lambda r: images.featured(r, "pixels", "cpu"))
    image = train.inputs.half()
    assert torch.equal(table[:, 0], image)
    assert torch.equal(table[:, 1, :, 1:], image[:, :, :-1])
    assert torch.equal(table[:, 4, :, :, :-1], image[:, :, :, 1:])


def test_as_many_views_as_copies_are_each_copy_once() -> None:
    """Whichever records a batch has: a record's views do not depend on the others."""
    table = torch.arange(24.0).reshape(4, 3, 2)
    views = tacit.data.Augmentation(3, features.CopyViews(table, every_copy=True)).views_of
    for rows in ([0, 1, 2, 3], [2, 0], [3]):
        assert torch.equal(views(torch.tensor(rows)[:, None]), table[rows].flatten(0, 1))


@pytest.mark.parametrize(("steps", "evaluations"), [(10, 3), (366, 20), (3, 10), (100, 1)])
def test_looks_are_even_and_end_with_the_last_step(steps: int, evaluations: int) -> None:
    looks = sorted(images.evaluation_steps(steps, evaluations))
    assert looks[-1] == steps
    assert looks[0] >= 1
    assert len(looks) == min(steps, evaluations)
    gaps = [b - a for a, b in itertools.pairwise(looks)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("held_out", [False, True])
def test_records_are_looked_at_both_ways(held_out: bool) -> None:
    """The mirror images are those of the records looked at, in their order."""
    source = images.Source("cifar10", held_out=held_out)
    _, looked_at = images.parts(features.features_of, source)
    assert torch.equal(training.mirrors_of(source).inputs, looked_at.inputs.flip(-1))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    turned = replace(looked_at, inputs=looked_at.inputs.flip(-1))
    both = training.accuracy(model, looked_at, turned)
    assert both == training.accuracy(model, turned, looked_at)
    setting = Setting("cifar10", batch_size=16, steps=2, learning_rate=0.1, both_ways=True)
    found = run(setting, 10, held_out=held_out)
    assert {"accuracy", "accuracy_one_way"} <= found.keys()


def test_orders_have_their_weights() -> None:
    _, test = tacit.load("cifar10")
    log, orders = (images.featured(test, kind, "cpu").inputs for kind in ("log", "orders"))
    ratio = (orders / log).reshape(len(log), 3, 81, -1)
    for rows, weight in ((ratio[:, :, :1], 0.7), (ratio[:, :, 1:17], 1), (ratio[:, :, 17:], 1.4)):
        torch.testing.assert_close(rows, torch.full_like(rows, weight))


def test_mixed_features_have_their_shares_and_norm_one() -> None:
    kinds = "mixed:scattering=0.5,log=0.3,pixels=0.2"
    train, _ = images.parts(features.features_of, images.Source("mnist", kinds, limit=40))
    widths = features.widths_of(kinds, (1, 28, 28))
    assert sum(widths) == train.inputs.shape[1]
    setting = Setting("mnist", kinds, 10.0, "ball", temperature=0.01, batch_size=16, steps=3)
    found, _, centred = training.run(Job("0", "it", setting, 0, limit=96))
    assert found["epsilon"] <= 3
    for inputs in (train.inputs, centred.inputs):  # before and after the centre is released
        for part, share in zip(inputs.split(widths, dim=1), (0.5, 0.3, 0.2), strict=True):
            assert torch.allclose(part.square().sum(dim=1), torch.tensor(share), rtol=1e-4)
    for wrong in ("mixed:log=0.5", "mixed:log=1.5,pixels=-0.5"):
        with pytest.raises(ValueError, match="sum of 1"):
            features.shares_of(wrong)
