"""The clipless experiments run from the command line, at sizes that say nothing."""

from __future__ import annotations

import importlib
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.usefixtures("clipless_folder")


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.usefixtures("real_data")
def test_a_search_then_its_final_seeds(tmp_path: Path) -> None:
    tasks = ["--tasks", "mnist/certified", "mnist/pixels", "mnist/scattering"]
    small = ["--records", "200", "--device", "cpu", *tasks]
    found, out = tmp_path / "search.jsonl", tmp_path / "final.jsonl"
    lines = load("figure_3b").main(["--search", "--trials", "1", "--out", str(found), *small])
    assert [line["task"] for line in lines].count("mnist/pixels") == 1
    assert not any("error" in line for line in lines)
    final = load("figure_3b").main(
        ["--chosen", str(found), "--seeds", "0", "--epsilons", "2", "--out", str(out), *small]
    )
    assert len(final) == 3
    assert all(line["epsilon"] <= 2.0 for line in final)
    assert [json.loads(text) for text in out.read_text().splitlines()] == final
    said = load("table_1").main([str(out)])
    assert "mnist, ε = 2" in said
    assert "published" in said


@pytest.mark.usefixtures("real_data")
def test_processes_write_what_fails_as_well(tmp_path: Path) -> None:
    runs = load("image_runs")
    spaces, workers = load("image_spaces"), load("image_workers")
    good = replace(spaces.KNOWN["mnist/certified"][0], batch_size=50, steps=2)
    settings = [replace(good, model="nothing"), good]
    jobs = [runs.Job("mnist/certified", s, 8.0, 0, held_out=True) for s in settings]
    results = workers.each_result(lambda _: jobs.pop() if jobs else None, 2, math.inf, "cpu", 200)
    lines = [{**job.facts(), **found} for job, found in results]
    assert sorted("error" in line for line in lines) == [False, True]


def test_no_trial_begins_after_its_time(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert load("figure_3b").main(["--search", "--seconds", "0", "--out", str(out)]) == []


def test_every_drawn_network_is_bounded_and_certified_where_it_says_so() -> None:
    import tacit

    settings, spaces = load("image_settings"), load("image_spaces")
    networks = load("image_networks")
    rng = random.Random(3)
    for task in ("mnist/pixels", "cifar10/pixels", "cifar10/certified", "fashion-mnist/trained"):
        shape = (3, 32, 32) if task.startswith("cifar10") else (1, 28, 28)
        for setting in (*spaces.KNOWN[task], *(spaces.drawn(task, rng) for _ in range(6))):
            model = networks.build(setting, shape, 10)
            bounds = tacit.lipschitz.propagate(model, settings.loss_of(setting), shape).by_parameter
            assert all(0 < bounds[n] < math.inf for n, p in model.named_parameters()
                       if p.requires_grad)  # fmt: skip
            if networks.has_certificates(setting):
                radii = tacit.certificates.certified_radius(model, torch.randn(3, *shape))
                assert radii.isfinite().all()
            assert networks.has_certificates(setting) or not settings.is_certified(task)


def test_a_certificate_of_scaled_records_is_one_of_pixels() -> None:
    """Pixels within r are scaled records within r over the smallest deviation."""
    import tacit
    from tacit.data import PublicScaler
    from tacit.data.catalogue import lookup

    torch.manual_seed(0)
    model = tacit.models.lipschitz_mlp((3, 32, 32), 10, hidden=(16,))
    known = lookup("cifar10")
    scale = PublicScaler(known.mean, known.std)
    inputs = torch.rand(200, 3, 1, 1) * torch.rand(200, 3, 32, 32)
    labels = model(scale(inputs)).argmax(dim=1)
    pixels = tacit.Records(inputs, labels, num_classes=10, name="cifar10")
    scaled = replace(pixels, inputs=scale(pixels.inputs))
    expected = tacit.certificates.certified_accuracy(model, pixels, before=scale)
    assert len(set(expected.shares)) > 2
    assert tuple(load("image_runs").certified(model, scaled, "cifar10").values()) == expected.shares


@pytest.mark.usefixtures("real_data")
@pytest.mark.parametrize("lie", [1.0, 30.0])
def test_an_attack_fells_no_certified_record_unless_certificates_lie(
    lie: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacked, out = load("attacked"), tmp_path / "attacked.json"
    true = attacked.certified_radius
    monkeypatch.setattr(attacked, "certified_radius", lambda *given: lie * true(*given))
    small = ["--task", "mnist/certified", "--records", "200", "--device", "cpu", "--steps", "5"]
    if lie == 1.0:
        rows = attacked.main([*small, "--out", str(out)])["rows"]
        assert any(row["certified"] > 0 for row in rows)
        assert all(row["certified"] <= row["under_attack"] for row in rows)
        assert not any(row["certified_that_fell"] for row in json.loads(out.read_text())["rows"])
    else:
        with pytest.raises(SystemExit, match="certificate is wrong"):
            attacked.main([*small, "--out", str(out)])


@pytest.mark.usefixtures("real_data")
def test_curves_go_on_where_they_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, out, picture = load("figures_14_16"), tmp_path / "curves.jsonl", tmp_path / "c.png"
    known = figures.ARCHITECTURES["mnist"]
    some = {name: known[name] for name in ("MLP", "linear on scattering features")}
    monkeypatch.setattr(figures, "ARCHITECTURES", {"mnist": some})
    monkeypatch.setattr(figures, "EPSILONS", (2.0, 8.0))
    small = ["--records", "200", "--device", "cpu", "--out", str(out)]
    figures.main(["--seeds", "0", *small])
    first = out.read_text().splitlines()
    assert len(first) == 2 * len(some)
    assert not any("error" in json.loads(line) for line in first)
    rows = figures.main(["--seeds", "0", "1", "--plot", str(picture), *small])
    assert len(out.read_text().splitlines()) == 2 * len(first)
    assert all(row["seeds"] == [0, 1] and row["least"] <= row["largest"] for row in rows)
    assert picture.stat().st_size > 10_000


def test_what_is_released_in_the_middle_is_charged_and_moves_records() -> None:
    from tacit import Records
    from tacit.lipschitz import audit_layer

    networks, spaces, runs = load("image_networks"), load("image_spaces"), load("image_runs")
    data = load("image_data")
    torch.manual_seed(0)
    setting = replace(spaces.ADAPTED, batch_size=50, steps=2, model="adapted:7:3:8:2")
    train = Records(
        torch.rand(200, 1, 28, 28), torch.arange(200) % 10, num_classes=10, public_size=200
    )
    model = networks.build(setting, train.shape, 10)
    again = networks.build(setting, train.shape, 10)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)  # filters are public: drawn from a seed of their own
    moved = next(layer for layer in model if isinstance(layer, networks.Moved))
    event = data.release_middle(model, train, 1e-6, seed=1)
    assert event.noise_multiplier == 1e-6
    coming = model[: list(model).index(moved)](train.inputs)
    torch.testing.assert_close(moved.centre, coming.mean(0), rtol=1e-3, atol=1e-4)
    assert audit_layer(moved, tuple(moved.centre.shape), input_norm=1.0).passed
    _, found = runs.run_once(setting, train, 3.0, seed=0)
    assert found["epsilon"] <= 3.0
    assert found["noise_multiplier"] > runs.noise(3.0, 200, 50, 2)  # the release takes its share


def test_layers_before_the_last_learn_at_their_own_rate() -> None:
    networks, spaces, runs = load("image_networks"), load("image_spaces"), load("image_runs")
    setting = replace(spaces.ADAPTED, model="adapted:7:3:8:2", body_rate=0.25)
    model = networks.build(setting, (1, 28, 28), 10)
    head, body = runs._optimizer(setting, model, clip=2.0).param_groups
    assert head["params"] == list(model[-1].parameters())
    assert sum(p.numel() for p in body["params"]) == 8 * 49
    assert (head["lr"], body["lr"]) == (setting.learning_rate / 2, setting.learning_rate / 8)


def test_what_was_repeated_is_chosen_before_what_was_lucky_once() -> None:
    search, spaces = load("image_search"), load("image_spaces")
    once, twice = spaces.KNOWN["cifar10/certified"][:2]
    found = search.Found()
    for setting, score in ((once, 0.9), (twice, 0.7), (twice, 0.8)):
        found.add(setting, score)
    assert found.ranked()[0] == twice
    assert found.top()[0] == once


@pytest.mark.parametrize(("workers", "expected"), [(1, 1), (2, 2), (3, 2)])
def test_processes_keep_to_their_records(workers: int, expected: int) -> None:
    search = load("image_search")
    tasks = ["mnist/pixels", "mnist/certified", "cifar10/scattering"]
    jobs = search.Search(tasks, 50, math.inf, workers)
    first = [jobs.next_job(i) for i in range(workers)]
    later = [jobs.next_job(i) for i in range(workers)]
    assert [search.group_of(j.task) for j in first] == [search.group_of(j.task) for j in later]
    assert len({search.group_of(j.task) for j in first}) == expected


@pytest.mark.usefixtures("real_data")
def test_the_histograms(tmp_path: Path) -> None:
    figures = load("figures_8_9_11_12")
    report = figures.main(
        ["--dataset", "mnist", "--records", "200", "--looked-at", "8", "--device", "cpu",
         "--models", "mlp:16", "--steps", "2", "--out", str(tmp_path)]
    )  # fmt: skip
    found = report["models"]["mlp:16"]["norms"]
    assert list(found) == ["before the first step", "after 2 steps"]
    assert all(0 < n["median"] <= n["largest"] <= 1 for m in found.values() for n in m.values())
    assert len(list(tmp_path.glob("*.png"))) == 2


@pytest.mark.usefixtures("real_data")
def test_table_7() -> None:
    row = load("table_7").one_set("yeast", trials=2, seeds=2, seconds=60.0)
    assert 40 < row["mean"] < 90
    assert row["epsilon"] <= 1.0
    assert row["trials"] == 2
