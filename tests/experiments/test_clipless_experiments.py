"""The clipless experiments run from the command line, at sizes that say nothing."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tacit
from experiments import results, runner
from experiments.clipless import __main__ as figures
from experiments.clipless import figure_3b, measures, networks, training
from tacit import Records
from tacit.data import PublicScaler
from tacit.data.catalogue import lookup
from tacit.lipschitz import audit_layer

SMALL = ["--small", "--device", "cpu"]
RECORDS = Path(__file__).parents[2] / "benchmarks" / "records" / "2026-11-15_clipless_accuracy"


@pytest.mark.usefixtures("real_data")
def test_a_search_then_its_final_seeds(tmp_path: Path) -> None:
    tasks = ["--tasks", "mnist/certified", "mnist/pixels", "mnist/scattering"]
    small = ["3b", *SMALL, *tasks, "--out", str(tmp_path)]
    lines = runner.main(figures.PAPER, [*small, "--search", "--trials", "1"])
    assert [line["name"] for line in lines].count("mnist/pixels") == 1
    assert not any("error" in line for line in lines)
    chosen = ["--chosen", str(tmp_path / "search.jsonl")]
    final = runner.main(figures.PAPER, [*small, *chosen, "--seeds", "0", "--epsilons", "2"])["3b"]
    assert len(final["settings"]) == 3
    assert all(row["epsilon"] <= 2.0 for row in final["settings"].values())
    said = runner.main(figures.PAPER, ["table_1", str(tmp_path / "small_runs.jsonl")])
    assert "mnist, ε = 2" in said
    assert "published" in said


def test_the_recorded_runs_can_be_read() -> None:
    assert figure_3b.TASKS.chosen(results.read_lines(RECORDS / "search_h200.jsonl"))
    said = runner.main(figures.PAPER, ["table_1", str(RECORDS / "final_h200.jsonl")])
    assert "| cifar10, ε = 8" in said


def test_no_trial_begins_after_its_time() -> None:
    assert runner.main(figures.PAPER, ["3b", "--search", "--seconds", "0"]) == []


def test_every_drawn_network_is_bounded_and_certified_where_it_says_so() -> None:
    rng = random.Random(3)
    for task in ("mnist/pixels", "cifar10/pixels", "cifar10/certified", "fashion-mnist/trained"):
        shape = (3, 32, 32) if task.startswith("cifar10") else (1, 28, 28)
        for setting in (*figure_3b.KNOWN[task], *(figure_3b.drawn(task, rng) for _ in range(6))):
            model = networks.build(setting, shape, 10)
            bounds = tacit.lipschitz.propagate(model, networks.loss_of(setting), shape).by_parameter
            assert all(0 < bounds[n] < math.inf for n, p in model.named_parameters()
                       if p.requires_grad)  # fmt: skip
            if networks.has_certificates(setting):
                radii = tacit.certificates.certified_radius(model, torch.randn(3, *shape))
                assert radii.isfinite().all()
            assert networks.has_certificates(setting) or not networks.is_certified(task)


def test_a_certificate_of_scaled_records_is_one_of_pixels() -> None:
    """Pixels within r are scaled records within r over the smallest deviation."""
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
    assert tuple(training.certified(model, scaled, "cifar10").values()) == expected.shares


@pytest.mark.usefixtures("real_data")
@pytest.mark.parametrize("lie", [1.0, 30.0])
def test_an_attack_fells_no_certified_record_unless_certificates_lie(
    lie: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "attacked.json"
    true = measures.certified_radius
    monkeypatch.setattr(measures, "certified_radius", lambda *given: lie * true(*given))
    small = ["attacked", *SMALL, "--task", "mnist/certified", "--steps", "5"]
    if lie == 1.0:
        rows = runner.main(figures.PAPER, [*small, "--out", str(out)])["rows"]
        assert any(row["certified"] > 0 for row in rows)
        assert all(row["certified"] <= row["under_attack"] for row in rows)
        assert not any(row["certified_that_fell"] for row in json.loads(out.read_text())["rows"])
    else:
        with pytest.raises(SystemExit, match="certificate is wrong"):
            runner.main(figures.PAPER, [*small, "--out", str(out)])


@pytest.mark.usefixtures("real_data")
def test_curves_by_architecture(tmp_path: Path) -> None:
    names = [
        f"mnist, {name}, epsilon {epsilon}"
        for name in ("MLP", "linear on scattering features")
        for epsilon in (2, 8)
    ]
    out = ["--only", *names, "--out", str(tmp_path)]
    report = runner.main(figures.PAPER, ["14", *SMALL, "--seeds", "0", "1", *out])["14"]
    assert set(report["settings"]) == set(names)
    for name, row in report["settings"].items():
        assert [run["seed"] for run in row["runs"]] == [0, 1]
        assert row["epsilon"] <= float(name.split()[-1])
    assert (tmp_path / "small_figure_14.png").stat().st_size > 10_000


def test_what_is_released_in_the_middle_is_charged_and_moves_records() -> None:
    torch.manual_seed(0)
    setting = replace(figure_3b.ADAPTED, batch_size=50, steps=2, model="adapted:7:3:8:2")
    train = Records(
        torch.rand(200, 1, 28, 28), torch.arange(200) % 10, num_classes=10, public_size=200
    )
    model = networks.build(setting, train.shape, 10)
    again = networks.build(setting, train.shape, 10)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)  # filters are public: drawn from a seed of their own
    moved = next(layer for layer in model if isinstance(layer, networks.Moved))
    event = training.release_middle(model, train, 1e-6, seed=1)
    assert event.noise_multiplier == 1e-6
    coming = model[: list(model).index(moved)](train.inputs)
    torch.testing.assert_close(moved.centre, coming.mean(0), rtol=1e-3, atol=1e-4)
    assert audit_layer(moved, tuple(moved.centre.shape), input_norm=1.0).passed
    _, found = training.run_once(setting, train, 3.0, seed=0)
    assert found["epsilon"] <= 3.0
    # The release takes its share of ε.
    assert found["noise_multiplier"] > runner.least_noise(50 / 200, 2, 3.0)


def test_layers_before_the_last_learn_at_their_own_rate() -> None:
    setting = replace(figure_3b.ADAPTED, model="adapted:7:3:8:2", body_rate=0.25)
    model = networks.build(setting, (1, 28, 28), 10)
    head, body = training.optimizer_of(setting, model, clip=2.0).param_groups
    assert head["params"] == list(model[-1].parameters())
    assert sum(p.numel() for p in body["params"]) == 8 * 49
    assert (head["lr"], body["lr"]) == (setting.learning_rate / 2, setting.learning_rate / 8)


@pytest.mark.usefixtures("real_data")
def test_the_histograms(tmp_path: Path) -> None:
    report = runner.main(
        figures.PAPER,
        ["norms", "--dataset", "mnist", "--records", "200", "--shown", "8", "--device", "cpu",
         "--models", "mlp:16", "--steps", "2", "--out", str(tmp_path)]
    )  # fmt: skip
    found = report["models"]["mlp:16"]["norms"]
    assert list(found) == ["before the first step", "after 2 steps"]
    assert all(0 < n["median"] <= n["largest"] <= 1 for m in found.values() for n in m.values())
    assert len(list(tmp_path.glob("*.png"))) == 2
