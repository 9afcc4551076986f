"""`tacit train --loss` and `--features`: what is asked for reaches the run, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.cli.build_model import loss_for, loss_numbers, recipe_for, tailored_for
from tacit.cli.settings import ModelSettings

FAST = ["--steps", "3", "--epsilon", "3", "--delta", "1e-4", "--quiet", "--json", "--seed", "0"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))


def train(folder: Path, *arguments: str):
    return CliRunner().invoke(app, ["train", *FAST, "--out", str(folder), *arguments])


def facts_of(folder: Path, *arguments: str) -> dict:
    result = train(folder, *arguments)
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "loss"),
    [
        (["--loss", "tailored"], "TailoredLoss(2, beta=11, gamma=2)"),
        (
            ["--loss", "tailored", "--threshold-epoch", "0", "--beta", "51", "--gamma", "0"],
            "TailoredLoss(0.0, beta=51.0, gamma=0.0)",
        ),
        (["--loss", "focal", "--gamma", "5"], "Focal(gamma=5.0)"),
        (["--loss", "sum-squared"], "SumSquaredError()"),
        (["--loss", "sum-absolute"], "SumAbsoluteError()"),
        (["--loss", "sum-huber", "--beta", "0.3"], "SumHuber(beta=0.3)"),
        (["--temperature", "0.5"], "CrossEntropy(temperature=0.5, smoothing=0.0)"),
    ],
)
def test_the_loss_that_is_asked_for_is_used(
    tmp_path: Path, arguments: list[str], loss: str
) -> None:
    """ε does not depend on it; what is trained does."""
    facts = facts_of(tmp_path / "x", *arguments)
    assert facts["config"]["used"]["loss"] == loss
    plain = facts_of(tmp_path / "y")
    assert facts["epsilon"] == plain["epsilon"]
    assert facts["loss"] != plain["loss"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gamma", "2"], "--loss focal or --loss tailored"),
        (["--loss", "focal", "--beta", "2"], "--loss sum-huber or --loss tailored"),
        (["--loss", "no-such"], "known are binary-cross-entropy"),
        (["--loss", "huber"], "is for regression"),
        (["--loss", "sum-squared", "--temperature", "2"], "--loss cross-entropy"),
        (["--loss", "focal", "--threshold-epoch", "2"], "--loss tailored"),
        (["--loss", "tailored", "--beta", "0"], "beta"),
        (["--loss", "tailored", "--query", "clipless"], "use --query clip"),
    ],
)
def test_what_does_not_go_together_is_named(tmp_path: Path, arguments, words) -> None:
    result = train(tmp_path / "x", *arguments)
    assert result.exit_code != 0
    assert words in str(result.exception)


def test_recipes_are_the_tables_rows() -> None:
    row = recipe_for("cifar10", "clip", "scattering")
    assert (row.batch_size, row.epochs, row.learning_rate, row.max_norm) == (8192, 60, 4.0, 0.1)
    assert recipe_for("cifar10", "clip", "mirrored-scattering") == row
    assert recipe_for("cifar10", "clip").batch_size == 1024
    for dataset, features, loss in (
        ("cifar10", "as-they-are", "TailoredLoss(7, beta=11, gamma=5)"),
        ("mnist", "scattering", "TailoredLoss(2, beta=11, gamma=10)"),
    ):
        tailored = tailored_for(dataset, features)
        numbers = loss_numbers(ModelSettings(), "tailored", row, tailored)
        assert repr(loss_for("tailored", numbers, "clip")) == loss


def test_scattering_features_are_made_once_and_trained_on(tmp_path: Path) -> None:
    facts = facts_of(tmp_path / "x", "--features", "scattering")
    assert facts["config"]["used"]["model"].startswith("Sequential")
    assert "in_features=324" in facts["config"]["used"]["model"]  # digits: 81×2×2
    assert any("scattering" in note for note in facts["notes"])
    files = list((tmp_path / "cache" / "scattering").glob("*.npz"))
    assert len(files) == 2
    stamps = [file.stat().st_mtime_ns for file in files]
    again = facts_of(tmp_path / "y", "--features", "scattering")
    assert again["accuracy"] == facts["accuracy"]
    assert [file.stat().st_mtime_ns for file in files] == stamps


@pytest.mark.parametrize("shape", [(81, 7, 7), (243, 8, 8)])
def test_features_of_the_papers_images_have_its_networks(shape) -> None:
    model = tacit.models.default_model(shape, 10)
    assert isinstance(model[0], torch.nn.Conv2d)
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_mirrored_features_are_those_of_both_images(tmp_path: Path) -> None:
    fixed = ("--query", "clipless", "--model", "lipschitz-linear")
    facts = facts_of(tmp_path / "x", *fixed, "--features", "mirrored-scattering")
    assert any("mirror image" in note for note in facts["notes"])
    other = facts_of(tmp_path / "y", *fixed, "--features", "scattering")
    assert not any("mirror image" in note for note in other["notes"])
    assert facts["epsilon"] == other["epsilon"]  # of each record alone: free
    assert facts["accuracy"] != other["accuracy"]
    assert len(list((tmp_path / "cache" / "scattering").glob("*.npz"))) == 4


def test_no_certificate_for_pixels_behind_features(tmp_path: Path) -> None:
    facts_of(tmp_path / "x", "--features", "scattering", "--query", "clipless")
    result = CliRunner().invoke(app, ["certify", str(tmp_path / "x")])
    assert result.exit_code != 0
    assert "scattering features" in str(result.exception)


def test_features_are_standardised_by_statistics_that_are_charged(tmp_path: Path) -> None:
    """The same steps have the same noise; only the release before them makes ε larger."""
    fixed = ("--features", "scattering", "--noise-multiplier", "2.0", "--epsilon", "50")
    bare = facts_of(tmp_path / "bare", *fixed)
    scaled = facts_of(tmp_path / "scaled", *fixed, "--scale-noise", "3")
    assert scaled["steps"] == bare["steps"]
    assert scaled["epsilon"] > bare["epsilon"] + 0.05
    notes = " ".join(scaled["notes"])
    assert "of each channel released with Gaussian noise of multiplier 3" in notes
    assert "is charged" in notes
    assert "in groups" not in notes
    assert "in groups" in " ".join(bare["notes"])
