"""`tacit train --overwrite`: what is replaced, what is kept, and when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.cli import app
from tacit.cli.run_directory import check_folder, clear_folder, new_folder
from tacit.errors import BudgetExceeded
from tacit.ledger.statement import read_statement

FAST = ["--steps", "3", "--epsilon", "1", "--delta", "1e-4", "--quiet", "--json", "--seed", "0"]
STALE = ("certificate.json", "certified.png", "trade_off.png")


def train(folder: Path, *arguments: str):
    return CliRunner().invoke(app, ["train", *FAST, "--out", str(folder), *arguments])


def create(file: Path, epsilon: float = 9) -> None:
    told = ["ledger", "create", str(file), "--epsilon", str(epsilon), "--delta", "1e-4"]
    assert CliRunner().invoke(app, told).exit_code == 0


@pytest.mark.parametrize("name", ["ledger.sqlite", "book.sqlite"])
@pytest.mark.parametrize("by", ["its name", "a way round", "a link"])
def test_the_shared_ledger_outlives_the_run(tmp_path: Path, name: str, by: str) -> None:
    folder = tmp_path / "x"
    book = folder / name
    create(book)
    given = {"its name": book, "a way round": folder / ".." / "x" / name, "a link": tmp_path / "l"}
    (tmp_path / "l").symlink_to(book)
    for charged in (1, 2):
        result = train(folder, "--ledger", str(given[by]), "--overwrite")
        assert result.exit_code == 0, result.exception
        assert len(read_statement(book).runs) == charged
    assert not any("replaced" in note for note in json.loads(result.stdout)["notes"])


def test_a_shared_ledger_alone_is_no_run(tmp_path: Path) -> None:
    create(tmp_path / "ledger.sqlite")
    check_folder(tmp_path, False, tmp_path / "ledger.sqlite")
    with pytest.raises(ValueError, match="holds a run already"):
        check_folder(tmp_path, False)
    with pytest.raises(ValueError, match=r"--ledger is .*run\.json; give another file"):
        check_folder(tmp_path, True, tmp_path / "run.json")


def test_what_spoke_of_the_old_run_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    for name in STALE:
        (tmp_path / name).touch()
    assert not clear_folder(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "mistake",
    [
        ["--lr", "-1"],
        ["--device", "gpu"],
        ["--model", "mnist-cnn"],
        ["--ema", "2"],
        ["--epsilon", "1e-9", "--delta", "1e-15"],
        ["--ledger", "text"],
        ["--ledger", "full"],
    ],
)
def test_a_run_that_cannot_begin_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no ledger at all")
    create(tmp_path / "full", 1)
    assert train(tmp_path / "y", "--ledger", "full").exit_code == 0
    folder = tmp_path / "x"
    assert train(folder).exit_code == 0
    (folder / "certificate.json").touch()
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    result = train(folder, "--overwrite", *mistake)
    assert result.exit_code != 0
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_overwrite_never_deletes_charges(tmp_path: Path) -> None:
    """A run that took its budget is still there after --overwrite, and the new one is refused."""
    folder = tmp_path / "x"
    assert train(folder).exit_code == 0
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    result = train(folder, "--overwrite")
    assert isinstance(result.exception, BudgetExceeded)
    for word in (str(folder / "ledger.sqlite"), "tacit ledger create", "--ledger", "--out"):
        assert word in str(result.exception)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    create(tmp_path / "larger")  # the remedy
    assert train(folder, "--overwrite", "--ledger", str(tmp_path / "larger")).exit_code == 0
    assert len(read_statement(folder / "ledger.sqlite").runs) == 1, "the first is kept"


def test_the_new_run_is_charged_on_the_same_ledger(tmp_path: Path) -> None:
    create(tmp_path / "ledger.sqlite")  # a folder's own ledger, with room for several runs
    for charged in (1, 2):
        result = train(tmp_path, "--overwrite")
        assert result.exit_code == 0, result.exception
        assert len(read_statement(tmp_path / "ledger.sqlite").runs) == charged
        notes = json.loads(result.stdout)["notes"]
        assert any("keeps the charges of both" in note for note in notes) == (charged == 2)


def test_a_run_without_a_folder_takes_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `make train` relies on: it succeeds however often it is called."""
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["train", *FAST]).exit_code == 0
    (folder,) = tmp_path.glob("runs/digits-*")
    assert len(read_statement(folder / "ledger.sqlite").runs) == 1
    for _ in range(20):
        folder = new_folder("digits")
        folder.mkdir(parents=True)  # raises if it is there
    assert len(list(tmp_path.glob("runs/digits-*"))) == 21


def test_make_train_deletes_nothing() -> None:
    command = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    (line,) = [line for line in command.splitlines() if "tacit train" in line]
    assert "--overwrite" not in line
    assert "--out" not in line
