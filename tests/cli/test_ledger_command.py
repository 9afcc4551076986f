"""`tacit ledger show` reads, and files that are no ledger are refused in one line."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit import Budget, Ledger
from tacit.accounting import Plan
from tacit.cli import app, main
from tacit.errors import LedgerDamaged
from tacit.ledger.statement import read_statement
from tacit.sampling import Poisson


def make(kind: str, file: Path) -> None:
    if kind == "text":
        file.write_text("month,pounds\n" * 50)
    elif kind == "empty":
        file.touch()
    elif kind == "foreign":
        with sqlite3.connect(file) as db:
            db.execute("CREATE TABLE people (name TEXT)")
        db.close()
    else:
        told = ["ledger", "create", str(file), "--epsilon", "1", "--delta", "1e-4"]
        assert CliRunner().invoke(app, told).exit_code == 0
        if kind == "truncated":
            file.write_bytes(file.read_bytes()[:-5000])


NO_LEDGERS = {
    "text": "not an SQLite database",
    "foreign": "table 'people'",
    "truncated": "damaged or cut short",
    "empty": "empty file",
}
CASES = [(command, kind) for command in ("show", "verify", "train") for kind in NO_LEDGERS]


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_no_ledger(tmp_path: Path, kind: str, command: str) -> None:
    file = tmp_path / "file"
    make(kind, file)
    before = file.read_bytes()
    told = ["ledger", command, str(file)]
    if command == "train":
        told = ["train", "--steps", "2", "--noise-multiplier", "9", "--quiet"]
        told += ["--ledger", str(file), "--out", str(tmp_path / "x")]
    result = CliRunner().invoke(app, told)
    assert isinstance(result.exception, LedgerDamaged)
    assert NO_LEDGERS[kind] in str(result.exception)
    assert file.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_show_changes_nothing(tmp_path: Path) -> None:
    make("ledger", tmp_path / "book")
    before = (tmp_path / "book").read_bytes(), (tmp_path / "book").stat().st_mtime_ns
    assert CliRunner().invoke(app, ["ledger", "show", str(tmp_path / "book")]).exit_code == 0
    after = (tmp_path / "book").read_bytes(), (tmp_path / "book").stat().st_mtime_ns
    assert after == before
    assert [f.name for f in tmp_path.iterdir()] == ["book"]


def test_a_folder_as_a_ledger_is_one_line_on_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["train", "--steps", "1", "--quiet", "--ledger", str(tmp_path)]
    told += ["--out", str(tmp_path / "x")]
    monkeypatch.setattr(sys, "argv", ["tacit", *told])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "not a file" in said
    assert "Traceback" not in said


def test_an_error_of_sqlite_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def locked(arguments: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr("tacit.cli.app", locked)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: the ledger could not be read or written: ")


def test_verify_finds_an_old_copy(tmp_path: Path) -> None:
    """The printed head, and the anchor, are in the ledger that they were taken from; no older."""
    book, copy, anchor = tmp_path / "book", tmp_path / "copy", tmp_path / "away" / "anchor"
    make("ledger", book)
    copy.write_bytes(book.read_bytes())
    with Ledger(book) as ledger:
        ledger.begin(Plan(Poisson(0.1), 50.0, ledger.budget.relation, 3))
    shown = CliRunner().invoke(app, ["ledger", "show", str(book)])
    head = shown.stdout.split("head ")[1].split()[0]
    assert head == read_statement(book).head
    assert CliRunner().invoke(app, ["ledger", "anchor", str(book), str(anchor)]).exit_code == 0
    for told in ([], ["--head", head], ["--anchor", str(anchor)]):
        found = CliRunner().invoke(app, ["ledger", "verify", str(book), *told])
        assert found.exit_code == 0, found.exception
        assert head in found.stdout
        old = CliRunner().invoke(app, ["ledger", "verify", str(copy), *told])
        assert (old.exit_code == 0) == (told == [])
        assert told == [] or isinstance(old.exception, LedgerDamaged)
    again = CliRunner().invoke(app, ["ledger", "anchor", str(copy), str(anchor)])
    assert isinstance(again.exception, LedgerDamaged), "an anchor is not moved to an older copy"


def test_a_damaged_ledger_is_one_line_on_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(tmp_path / "book", Budget(1.0, 1e-4)).close()
    with sqlite3.connect(tmp_path / "book") as db:
        db.execute("""UPDATE log SET body = replace(body, '"epsilon":1.0', '"epsilon":9.0')""")
    db.close()
    monkeypatch.setattr(sys, "argv", ["tacit", "ledger", "show", str(tmp_path / "book")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "changed outside of Tacit" in said
    assert "backup" in said
