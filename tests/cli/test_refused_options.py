"""An option that would be ignored, or a number that makes no sense, is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tacit.cli import app
from tacit.cli.console import device_for
from tacit.cli.schema import options_of
from tacit.cli.settings import TrainSettings

CLIPLESS = ["--query", "clipless"]


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, ValueError), result.exception
    assert "\n" not in str(result.exception)
    return str(result.exception)


IGNORED = [
    (["--steps", "5", "--epochs", "2"], "--epochs is 2"),
    (["--public-size", "9"], "--public-size is 9"),
    (["--data", "x.csv", "--target", "y", "--dataset", "mnist"], "--dataset is mnist"),
    ([*CLIPLESS, "--max-norm", "1"], "--max-norm is 1"),
    ([*CLIPLESS, "--blocks", "layer"], "--blocks is layer"),
    ([*CLIPLESS, "--rule", "clip"], "--rule is clip"),
    (["--gradient-clip", "1"], "--gradient-clip is 1"),
    (["--query", "batch-clip", "--gradient-clip", "1"], "--gradient-clip is 1"),
    (["--optimizer", "adam", "--momentum", "0.9"], "--momentum is 0.9"),
]
OUT_OF_RANGE = [
    *(("--epochs", value) for value in ("0", "-1", "nan", "inf")),
    *(("--lr", value) for value in ("0", "-1", "nan", "inf")),
    *(("--momentum", value) for value in ("-0.1", "1", "nan")),
    *(("--max-norm", value) for value in ("0", "-1", "nan", "inf")),
    *(("--batch-size", value) for value in ("0", "-5")),
    *(("--seed", value) for value in ("-1", str(2**63))),
    *(("--noise-multiplier", value) for value in ("1e-9", "1e-160", "-1", "nan")),
    ("--scale-noise", "1e-9"),
    ("--steps", "-1"),
    *(("--ema", value) for value in ("-0.1", "1", "nan")),
    ("--device", "gpu"),
    ("--device", "meta"),
    ("--device", "cuda:99"),
]


@pytest.mark.parametrize(("arguments", "says"), IGNORED)
def test_an_option_that_would_be_ignored(tmp_path: Path, arguments: list[str], says: str) -> None:
    assert says in refusal("train", "--out", str(tmp_path / "x"), *arguments)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("option", "value"), OUT_OF_RANGE)
def test_a_number_out_of_range(tmp_path: Path, option: str, value: str) -> None:
    said = refusal("train", "--out", str(tmp_path / "x"), f"{option}={value}")
    assert said.startswith(f"{option} is ")
    assert "give " in said
    assert not (tmp_path / "x").exists()


def test_no_local_batch_of_nothing(tmp_path: Path) -> None:
    local = ["--query", "batch-clip", "--local", "sgd", "--local-lr", "1", "--local-batch", "0"]
    assert "--local-batch is 0" in refusal("train", "--out", str(tmp_path / "x"), *local)


def test_a_gradient_clip_is_above_0_or_0_for_none(tmp_path: Path) -> None:
    for value in ("-1", "nan", "inf"):
        told = f"--gradient-clip={value}"
        assert "--gradient-clip is" in refusal("inspect", told)
        assert "--gradient-clip is" in refusal("train", *CLIPLESS, told, "--out", str(tmp_path))


def test_the_defaults_are_refused_by_nothing_and_are_written_down(tmp_path: Path) -> None:
    for query in ("clip", "clipless"):
        told = ["--query", query, "--steps", "1", "--noise-multiplier", "9", "--quiet", "--json"]
        result = CliRunner().invoke(app, ["train", *told, "--out", str(tmp_path / query)])
        assert result.exit_code == 0, result.exception
        used = json.loads(result.stdout)["config"]["used"]
        assert (used["dataset"], used["rule"], used["blocks_by"]) == (
            "digits",
            "clip",
            "flat",
        )


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_for("auto") == device_for("cpu") == torch.device("cpu")
    for told in (["certify", str(tmp_path)], ["train", "--out", str(tmp_path / "x")]):
        for name in ("cuda", "gpu"):
            said = refusal(*told, "--device", name)
            assert said.startswith(
                f"--device is '{name}', and PyTorch finds no CUDA GPUs here; give"
            )


ACCOUNTED = ["--sampling-rate", "0.1", "--steps", "5", "--delta", "1e-5"]


@pytest.mark.parametrize("value", ["1e-9", "1e-4", "1e-160", "nan"])
@pytest.mark.parametrize("command", ["epsilon", "trade-off"])
def test_too_little_noise_to_account_for(command: str, value: str) -> None:
    told = refusal(command, "--noise-multiplier", value, *ACCOUNTED)
    assert told.startswith("--noise-multiplier is ")


def test_the_least_noise_is_accounted_for() -> None:
    result = CliRunner().invoke(app, ["epsilon", "--noise-multiplier", "1e-3", *ACCOUNTED])
    assert result.exit_code == 0, result.exception
    assert "this is no privacy" in " ".join(result.stdout.replace("│", " ").split())


def test_noise_for_no_step_is_refused_and_for_a_vast_budget_called_by_its_name() -> None:
    rate = ["--sampling-rate", "0.1", "--delta", "1e-5"]
    assert "--steps is 0" in refusal("noise", "--epsilon", "1", *rate, "--steps", "0")
    told = ["noise", "--epsilon", "100", *rate, "--steps", "5", "--json"]
    assert '"note": "this is no privacy' in CliRunner().invoke(app, told).stdout


@pytest.mark.parametrize("sampling", ["fixed-size", "shuffle"])
def test_a_sampling_that_is_analysed_for_replace_one_alone(tmp_path: Path, sampling: str) -> None:
    told = ["--sampling", sampling, "--relation", "add-or-remove-one"]
    counted = ["--steps", "5", "--delta", "1e-5", "--population", "100", "--batch-size", "5"]
    for command in (
        ["train", "--out", str(tmp_path / "x")],
        ["epsilon", "--noise-multiplier", "1", *counted],
        ["noise", "--epsilon", "1", *counted],
    ):
        assert "leave --relation out, or give --sampling poisson" in refusal(*command, *told)


@pytest.mark.parametrize(
    ("option", "value"), [("--steps", "-1"), ("--delta", "0"), ("--sampling-rate", "2")]
)
@pytest.mark.parametrize("command", ["epsilon", "trade-off"])
def test_a_number_that_cannot_be_accounted_for(command: str, option: str, value: str) -> None:
    told = refusal(command, "--noise-multiplier", "1", *ACCOUNTED, f"{option}={value}")
    assert told.startswith(f"{option} is {value}; give ")


def test_a_picture_is_a_file(tmp_path: Path) -> None:
    told = ["trade-off", "--noise-multiplier", "1", *ACCOUNTED, "--out", str(tmp_path)]
    assert "which is a folder" in refusal(*told)


def test_blanks_around_classes_are_not_part_of_them() -> None:
    classes = options_of(TrainSettings)["classes"]
    assert classes.read("a, b ,c", "--classes") == ("a", "b", "c")
    for text in ("", "a,,b", "a, "):
        with pytest.raises(ValueError, match="--classes is"):
            classes.read(text, "--classes")
