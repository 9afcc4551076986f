"""`tacit train --resume`: a run that was killed goes on from its folder, with its own settings."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import tacit
import tacit.cli.schema
from tacit.cli import app, main
from tacit.errors import CheckpointRefused
from tacit.ledger import read_statement
from tacit.training.state_file import only_process

RUN = ["--steps", "30", "--epsilon", "2", "--delta", "1e-4", "--quiet", "--json"]
TABLE = ["--target", "label", "--classes", "0,1", "--feature-range", "-4,4"]


def train(*arguments: object):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 4, generator=generator)
    rows = [",".join([*(f"{v:.4f}" for v in row), str(int(row[0] > 0))]) for row in inputs.tolist()]
    file = tmp_path / "table.csv"
    file.write_text("\n".join(["a,b,c,d,label", *rows]) + "\n")
    return file


def killed_at(step: int, *arguments: object, number: int = signal.SIGKILL) -> None:
    """A process that trains, and kills itself in the middle of a step of the optimizer."""

    def work() -> None:
        left, take = [step], torch.optim.SGD.step

        def counted(self, *args):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)
            return take(self, *args)

        torch.optim.SGD.step = counted
        result = train(*arguments)
        raise AssertionError(f"it was not killed: {result.output} {result.exception!r}")

    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), status


def run_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_a_killed_run_is_resumed(table: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    killed_at(12, "--data", table, *TABLE, *RUN, "--ema", 0.9, "--out", folder)
    assert not (folder / "run.json").exists()

    again = train("--data", table, *TABLE, *RUN, "--out", folder)
    assert f"resume it with: tacit train --resume {folder}" in str(again.exception)

    refused = train("--resume", folder, "--checkpoint-every", 0)
    assert "a resumed run keeps its checkpoint up to date" in str(refused.exception)

    killed_at(5, "--resume", folder)
    result = train("--resume", folder, "--json", "--quiet", "--max-physical-batch", 64)
    assert result.exit_code == 0, result.exception
    facts = json.loads(result.stdout)
    assert (facts["steps"], facts["planned_steps"], facts["stopped"]) == (28, 30, "budget")
    assert facts["epsilon"] <= 2
    assert any("2 times, the last time at step 15" in note for note in facts["notes"])
    assert read_statement(folder / "ledger.sqlite").runs[0].steps == 30
    assert facts["config"]["settings"]["training"]["ema"] == 0.9
    left = {file.name for file in folder.iterdir()}
    assert not left & {"checkpoint.safetensors", "resume.json"}
    assert load_file(folder / "weights.safetensors")

    complete = train("--resume", folder)
    assert "holds a run that is complete" in str(complete.exception)


@pytest.mark.usefixtures("usual_interrupts")
def test_an_interrupted_run_is_saved_and_resumed(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen, take = tmp_path / "x", [], torch.optim.SGD.step

    def interrupted(self, *args):
        seen.append(len(seen))
        if len(seen) == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return take(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", interrupted)
    told = [*RUN[:-1], "--out", folder]
    result = train("--data", table, *TABLE, *told)
    assert result.exit_code == 130, result.exception
    assert "the run is not complete" in result.stdout
    assert (run_of(folder)["steps"], run_of(folder)["stopped"]) == (12, "interrupted")
    result = train("--resume", folder, "--quiet")
    assert result.exit_code == 0, result.exception
    assert "not complete" not in result.stdout
    assert (run_of(folder)["steps"], run_of(folder)["stopped"]) == (30, "plan complete")


SCHEMA = """\
format = 1
target = "label"
[[columns]]
name = "a"
kind = "numeric"
range = "release"
[[columns]]
name = "b"
kind = "categorical"
categories = ["0.5", "1"]
[[columns]]
name = "label"
kind = "boolean"
"""


@pytest.mark.parametrize("counted", [False, True])
def test_what_was_released_is_used_again_and_not_released_again(
    counted: bool, table: Path, tmp_path: Path
) -> None:
    folder, schema = tmp_path / "x", tmp_path / "schema.toml"
    schema.write_text(SCHEMA)
    more = ["--schema", schema, "--category-noise", 9] if counted else [*TABLE, "--scale-noise", 20]
    killed_at(12, "--data", table, *more, *RUN, "--out", folder)
    before = (folder / "preprocessing.json").read_bytes()
    result = train("--resume", folder, "--json", "--quiet")
    assert result.exit_code == 0, result.exception
    assert (folder / "preprocessing.json").read_bytes() == before
    assert json.loads(result.stdout)["steps"] == 29
    assert len(tacit.data.load_preprocessing(folder).stages) == 2
    assert len(json.loads(result.stdout)["plan"]["prelude"]) == 1 + counted


def test_a_run_that_was_killed_before_its_first_checkpoint_begins(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x"

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr("tacit.training.trainer.save_state", die)
        killed_at(99, "--data", table, *TABLE, *RUN, "--out", folder)
    assert (folder / "resume.json").exists()
    assert not (folder / "checkpoint.safetensors").exists()
    result = train("--resume", folder, "--json", "--quiet")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["steps"] == 30


def test_without_checkpoints_nothing_of_them_is_written(table: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    killed_at(12, "--data", table, *TABLE, *RUN, "--checkpoint-every", 0, "--out", folder)
    assert not (folder / "checkpoint.safetensors").exists()
    assert "has no resume.json" in str(train("--resume", folder).exception)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--epsilon", 4], "--epsilon is given beside --resume"),
        (["--epsilon", 3], "--epsilon is given beside --resume"),
        (["--out", "y"], "--out is given beside --resume"),
        (["--overwrite"], "--overwrite is given beside --resume"),
        (["--seed", 1], "--seed is given beside --resume"),
        (["--config", "c.toml"], "--config is given beside --resume"),
        ([], "has no resume.json"),
    ],
)
def test_what_would_change_the_run_is_refused(
    given: list, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = train("--resume", tmp_path, *given)
    assert result.exit_code == 1
    assert isinstance(result.exception, ValueError)
    assert said in str(result.exception)


def holding(folder: Path, outlived: bool = False) -> int:
    """A process that trains in the folder, and has started another, which may outlive it."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with only_process(folder):
            if outlived and os.fork() == 0:
                time.sleep(10)
                os._exit(0)
            os.write(told, b"x")
            time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    return pid


def ended(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_second_process_in_one_folder_is_refused(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, unused = tmp_path / "x", tmp_path / "unused"
    killed_at(12, "--data", table, *TABLE, *RUN, "--out", folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    pid = holding(folder, outlived=True)
    with pytest.raises(SystemExit) as exited:
        main(["train", "--resume", str(folder)])
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert error.splitlines() == [
        f"error: another process is training in {folder}; wait until it ends, or end it"
    ]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    ended(pid)  # the lock ends with its process, though a worker of it goes on
    result = train("--resume", folder, "--quiet")
    assert result.exit_code == 0, result.exception

    pid = holding(unused)
    result = train("--data", table, *TABLE, *RUN, "--out", unused)
    assert isinstance(result.exception, CheckpointRefused)
    assert unused.is_dir()
    assert not list(unused.iterdir())
    ended(pid)


def test_a_run_that_another_process_completes_meanwhile(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x"
    killed_at(12, "--data", table, *TABLE, *RUN, "--out", folder)
    read = tacit.cli.schema.read_resumed

    def slowly(*arguments):
        values = read(*arguments)
        monkeypatch.undo()
        assert train("--resume", folder, "--quiet").exit_code == 0
        return values

    monkeypatch.setattr(tacit.cli.schema, "read_resumed", slowly)
    result = train("--resume", folder)
    assert "was completed by another process meanwhile" in str(result.exception)
    assert isinstance(result.exception, ValueError)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"config": 1}', "\x00", "[" * 9999])
def test_a_broken_resume_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "resume.json").write_text(text)
    result = train("--resume", tmp_path)
    assert isinstance(result.exception, ValueError)
    assert "resume.json" in str(result.exception)
