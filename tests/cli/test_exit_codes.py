"""0 for success, 2 for a user's mistake, 1 for ours, 130 for Ctrl-C; and messages name options."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.cli import app, main
from tacit.errors import argument, in_words, naming_options


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TACIT_DEBUG", raising=False)
    (tmp_path / "two.csv").write_text("a,b,y\n1,2,0\n3,4,1\n5,6,0\n7,8,1\n", encoding="utf-8")


QUICK = ["--steps", "1", "--noise-multiplier", "9", "--model", "linear", "--quiet", "--json"]
MISTAKES = [
    (["train", "--steps", "many"], "--steps"),
    (["train", "--stepz", "1"], "--stepz"),
    (["trane"], "trane"),
    (["train", "--steps", "-1"], "--steps is -1"),
    (["train", "--data", "no.csv", "--target", "y"], "no file no.csv"),
    (["train", "--data", "two.csv", "--target", "z"], "no column 'z'"),
    (["train", "--data", "two.csv", "--target", "y", "--classes", "0"], "--classes is 0"),
    (["train", "--data", "two.csv", "--target", "y", "--classes", "7,8"], "with --classes"),
    (["train", "--data", "two.csv", "--target", "a", "--public-size", "0"], "--public-size is 0"),
    (["train", "--data", "two.csv", "--target", "y", "--batch-size", "99"], "--batch-size is 99"),
    (["train", "--adaptive-quantile", "0.5", "--max-norm", "1e-20"], "--max-norm is"),
    (["train", "--loss", "nothing"], "tacit --plugin FILE"),
    (["train", "--groups", "99", "--blocks", "layer"], "--groups is 99"),
    (["train", "--loss", "focal", "--gamma", "-1"], "--gamma is -1"),
    (
        ["train", "--public-share", "0.99999", "--groups", "1", "--blocks", "layer"],
        "--pu",
    ),
    (["data", "nothing"], "--data FILE"),
    (["ledger", "create", "b", "--epsilon", "-1", "--delta", "1e-5"], "--epsilon is -1"),
    (["certify", "nowhere"], "nowhere has no run.json"),
    (["certify", "nowhere", "--radii", "x"], "--radii is 'x'"),
    (["--plugin", "broken.py", "data"], "ZeroDivisionError"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES)
def test_a_mistake_ends_with_2_and_names_the_option(arguments, says, capsys):
    Path("broken.py").write_text("1 / 0\n", encoding="utf-8")
    files = sorted(os.listdir())
    told = [*arguments, *QUICK, "--out", "new"] if arguments[0] == "train" else arguments
    if "--steps" in arguments:
        told = [*arguments, "--out", "new"]
    assert ended(*told) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
    for word in ("_size is", "classes=", "feature_range", "test_path", "load_file("):
        assert word not in said
    assert sorted(f for f in os.listdir() if f != "__pycache__") == files


def test_success_ends_with_0(capsys):
    for told in (["--version"], ["data", "--json"], ["train", *QUICK, "--out", "new"]):
        assert ended(*told) == 0


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("two\nlines"), AssertionError()])
def test_an_error_of_ours_ends_with_1_in_a_few_words(error, monkeypatch, capsys):
    def fails(settings):
        raise error

    monkeypatch.setattr("tacit.cli.console.device_for", fails)
    assert ended("train", *QUICK, "--out", "new") == 1
    said = capsys.readouterr().err
    assert "error of Tacit itself" in said
    assert type(error).__name__ in said
    assert "TACIT_DEBUG=1" in said
    assert "tacit doctor" in said
    assert "Traceback" not in said
    monkeypatch.setenv("TACIT_DEBUG", "1")
    assert ended("train", *QUICK, "--out", "new") == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_value_error_that_nobody_raised_on_purpose_is_ours(monkeypatch, capsys):
    """Also where it happens in a file of ours: int() did not say which option to change."""
    monkeypatch.setattr("tacit.cli.console.device_for", int)
    assert ended("train", *QUICK, "--out", "new") == 1
    assert "ValueError" in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_the_run_is_saved(monkeypatch, capsys):
    from tacit.training.trainer import Trainer

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_after_step", interrupted)
    assert ended("train", *QUICK, "--out", "new") == 130
    assert '"stopped": "interrupted"' in Path("new/run.json").read_text(encoding="utf-8")
    module = importlib.import_module("tacit.cli.train_command")  # a command has its name too
    monkeypatch.setattr(module, "run_training", interrupted_early)
    assert ended("train", *QUICK, "--out", "newer") == 130


def interrupted_early(settings):
    raise KeyboardInterrupt


def test_what_fails_before_a_charge_leaves_no_file_and_after_it_the_charge(monkeypatch, capsys):
    from tacit.ledger import read_statement
    from tacit.training.trainer import Trainer

    loop = Trainer._loop
    monkeypatch.setattr(Trainer, "_loop", lambda *_: 1 / 0)
    assert ended("train", *QUICK, "--out", "a/b/new") == 1
    assert not Path("a").exists()

    def fails_after_a_step(trainer, step, history):
        raise ZeroDivisionError

    monkeypatch.setattr(Trainer, "_loop", loop)
    monkeypatch.setattr(Trainer, "_after_step", fails_after_a_step)
    assert ended("train", *QUICK, "--out", "new") == 1
    assert read_statement("new/ledger.sqlite").epsilon_charged > 0


def test_names_are_python_s_outside_of_the_command_line():
    def said() -> tuple[str, str, str]:
        return (
            argument("public_size"),
            argument("test_path", "--test-data"),
            in_words("give Noise(...)", "give --noise"),
        )

    python = ("public_size", "test_path", "give Noise(...)")
    assert said() == python
    with naming_options():
        assert said() == ("--public-size", "--test-data", "give --noise")
    CliRunner().invoke(app, ["data", "nothing"])
    assert said() == python, "a command has changed the words for the rest of the process"
