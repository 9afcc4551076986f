"""A run's folder holds what its inputs went through: paid-for statistics are not lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.data import (
    Preprocessing,
    PublicScaler,
    RangeScaler,
    UnitNorm,
    load_preprocessing,
    release_statistics,
)
from tacit.data.private_scaling import release_centre
from tacit.data.scaling import YIQ
from tacit.data.scattering import ScatteringMap
from tacit.errors import DataError
from tacit.report import save_run

FAST = ["--steps", "2", "--noise-multiplier", "4", "--epsilon", "60", "--delta", "1e-3", "--quiet"]


@pytest.fixture
def right_after(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict:
    """The test outputs at the moment when training ends, before anything is saved."""
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    seen: dict = {}

    def watched(run, folder, test, **more):
        with torch.no_grad():
            seen["outputs"] = run.model.eval()(test.inputs)
        return save_run(run, folder, test, **more)

    monkeypatch.setattr("tacit.report.run_folder.save_run", watched)
    return seen


def outputs_from(folder: Path, raw: torch.Tensor) -> torch.Tensor:
    """By the folder alone: its preprocessing, its network, its weights."""
    model, preprocessing = tacit.load_run(folder).model, load_preprocessing(folder)
    with torch.no_grad():
        return model(preprocessing(raw))


def own_table(folder: Path) -> torch.Tensor:
    x = (3 * np.random.default_rng(0).normal(size=(120, 2)) + 1).round(3)
    for name, rows in (("train", x[:100]), ("test", x[100:])):
        lines = [f"{a},{b},{int(a > 0)}" for a, b in rows]
        (folder / f"{name}.csv").write_text("\n".join(["a,b,y", *lines]))
    return torch.tensor(x[100:], dtype=torch.float32)


@pytest.mark.parametrize("query", ["clip", "clipless"])
def test_released_statistics_of_a_table_are_kept(tmp_path, right_after, query) -> None:
    raw = own_table(tmp_path)
    arguments = ["--data", str(tmp_path / "train.csv"), "--test-data", str(tmp_path / "test.csv")]
    arguments += ["--target", "y", "--feature-range", "-9,9", "--scale-noise", "2"]
    arguments += ["--batch-size", "40", "--query", query, "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["train", *FAST, *arguments])
    assert result.exit_code == 0, result.exception
    (tmp_path / "train.csv").unlink()
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "run", moved)
    assert torch.equal(outputs_from(moved, raw), right_after["outputs"])
    kinds = [type(stage) for stage in load_preprocessing(moved).stages]
    assert kinds == [RangeScaler, PublicScaler]


@pytest.mark.parametrize("features", ["scattering", "mirrored-scattering"])
@pytest.mark.parametrize("scale", [[], ["--scale-noise", "2"]], ids=["groups", "released"])
def test_features_and_their_statistics_are_kept(tmp_path, right_after, features, scale) -> None:
    arguments = ["--features", features, *scale, "--model", "linear", "--out", str(tmp_path / "x")]
    result = CliRunner().invoke(app, ["train", *FAST, *arguments])
    assert result.exit_code == 0, result.exception
    shutil.rmtree(tmp_path / "cache")
    _, test = tacit.load("digits", scale=None)
    assert torch.equal(outputs_from(tmp_path / "x", test.inputs), right_after["outputs"])


def test_certify_uses_the_statistics_that_were_released(tmp_path, right_after) -> None:
    """On the code before, a run with --scale-noise could not be certified from its folder."""
    own_table(tmp_path)
    arguments = ["--data", str(tmp_path / "train.csv"), "--test-data", str(tmp_path / "test.csv")]
    arguments += ["--target", "y", "--feature-range", "-9,9", "--scale-noise", "2"]
    arguments += ["--batch-size", "40", "--query", "clipless", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["train", *FAST, *arguments, "--json"])
    facts = json.loads(result.stdout)
    found = CliRunner().invoke(app, ["certify", str(tmp_path / "run"), "--json"])
    assert found.exit_code == 0, found.exception
    shares = json.loads(found.stdout)["certified_accuracy"]
    assert shares == facts["certificate"]["certified_accuracy"]


def test_statistics_are_on_disk_before_the_first_step(tmp_path, monkeypatch) -> None:
    """A run that is killed in training has paid for them as well."""
    own_table(tmp_path)

    def killed(self):
        raise SystemExit(9)

    monkeypatch.setattr(tacit.Trainer, "fit", killed)
    arguments = ["--data", str(tmp_path / "train.csv"), "--target", "y", "--scale-noise", "2"]
    arguments += ["--feature-range", "-9,9", "--batch-size", "40", "--out", str(tmp_path / "run")]
    assert CliRunner().invoke(app, ["train", *FAST, *arguments]).exit_code == 9
    assert load_preprocessing(tmp_path / "run").stages[-1].origin.startswith("released with")


def test_every_stage_comes_back_as_it_was(tmp_path) -> None:
    torch.manual_seed(0)
    images = torch.rand(5, 3, 8, 8)
    scaler, _ = release_statistics(images, 0.0, 1.0, noise_multiplier=3.0, public_size=5)
    shape = tuple(YIQ()(images).shape[1:])
    features = ScatteringMap(shape, mirror=True, groups=None)
    centre, _ = release_centre(features(images), noise_multiplier=1.0, public_size=5)
    made = Preprocessing((RangeScaler(0.1, 0.9), scaler, YIQ(), features, centre, UnitNorm()))
    made.save(tmp_path)
    found = load_preprocessing(tmp_path)
    assert torch.equal(found(images), made(images))
    assert found.describe() == made.describe()
    assert [file.name for file in tmp_path.iterdir()] == ["preprocessing.json"]


def test_python_saves_them_too_and_leaves_none_of_another_run(tmp_path) -> None:
    model = torch.nn.Linear(3, 2)
    records = tacit.Records(torch.randn(20, 3), torch.arange(20) % 2, 2, public_size=20)
    run = tacit.Trainer(
        model, tacit.losses.CrossEntropy(), tacit.PerSampleClip(1.0),
        tacit.PoissonSampler(records, 0.5, steps=1), torch.optim.SGD(model.parameters(), lr=0.1),
        tacit.Budget(50.0, 1e-3), noise=tacit.Noise(1.0), callbacks=(),
    ).fit()  # fmt: skip
    save_run(run, tmp_path, preprocessing=PublicScaler(1.0, 2.0))
    assert torch.equal(load_preprocessing(tmp_path)(torch.ones(1, 3)), torch.zeros(1, 3))
    save_run(run, tmp_path, overwrite=True)
    with pytest.raises(ValueError, match=r"has no preprocessing\.json"):
        load_preprocessing(tmp_path)


def test_what_cannot_be_kept_or_read_is_named(tmp_path) -> None:
    class Own(UnitNorm):
        pass

    with pytest.raises(ValueError, match="Own is a stage of your own"):
        Preprocessing((Own(),)).save(tmp_path)
    (tmp_path / "preprocessing.json").write_bytes(b"cut short")
    with pytest.raises(DataError, match="cannot be read"):
        load_preprocessing(tmp_path)
