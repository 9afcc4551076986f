"""`tacit doctor` says what is there, and its exit code whether all of it can be used."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.budget import Budget
from tacit.cli import app
from tacit.cli.doctor_command import NEEDED, OPTIONAL, TESTED_TORCH
from tacit.ledger import Ledger

RUN = ["train", "--steps", "1", "--model", "linear", "--quiet"]


def examined(*arguments: object) -> tuple[int, dict[tuple[str, str], tuple[str, str]]]:
    """The exit code, and state and text by section and name."""
    result = CliRunner().invoke(app, ["doctor", "--json", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    facts = json.loads(result.stdout)
    found = {(f["section"], f["name"]): (f["state"], f["text"]) for f in facts["findings"]}
    assert facts["well"] is (result.exit_code == 0)
    return result.exit_code, found


@pytest.fixture(autouse=True)
def _folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TACIT_DATA", raising=False)
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))


def test_a_machine_that_is_well() -> None:
    code, found = examined()
    assert code == 0
    assert {("installed", name) for name in ("tacit", "Python", *NEEDED)} <= set(found)
    assert {("optional", name) for name in OPTIONAL} <= set(found)
    for name in (("device and speed", "device"), ("device and speed", "speed path")):
        assert name in found
    assert found["randomness", "source"][0] == "ok"
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    assert "all is well" in shown.stdout


def test_the_versions_of_pytorch_are_those_that_the_tests_name() -> None:
    stated = (Path(__file__).parents[1] / "test_torch_internals.py").read_text(encoding="utf-8")
    assert tuple(re.findall(r"\b\d+\.\d+\b", stated.splitlines()[0])) == TESTED_TORCH


def test_a_version_that_was_not_tested_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tacit.cli.doctor_command.version", lambda name: "1.0.1")
    code, found = examined()
    assert found["installed", "torch"][0] == "note"
    assert code == 0


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tacit.cli.doctor_command.find_spec", lambda name: None)
    code, found = examined()
    assert code == 0, "nothing needs an optional package"
    assert "pip install scikit-learn" in found["optional", "sklearn"][1]


def test_folders_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TACIT_DATA", str(tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "file" / "cache"))
    code, found = examined()
    assert code == 1
    assert found["folders", "TACIT_DATA"][0] == found["folders", "cache"][0] == "problem"


def test_a_table(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("age,height,ill\n1,2,0\n", encoding="utf-8")
    code, found = examined("--data", file, "--target", "ill")
    assert code == 0
    assert found["data", str(file)][1] == "3 columns: age, height, ill"
    code, found = examined("--data", file, "--target", "sick")
    assert code == 1
    assert "--target ill" in found["data", "target"][1]
    for name, content in (("e.csv", b""), ("e.parquet", b"PAR1"), ("e.npz", b"PK"), ("e.txt", b"")):
        (tmp_path / name).write_bytes(content)
        assert examined("--data", tmp_path / name)[0] == 1
    assert examined("--data", tmp_path / "none.csv")[0] == 1


def test_a_run_and_its_ledger(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert CliRunner().invoke(app, [*RUN, "--out", str(folder)]).exit_code == 0
    code, found = examined("--run", folder)
    assert code == 0
    assert found["run", "weights.safetensors"] == ("ok", "2 tensors")
    # A run of its own takes the whole budget: whole, and not to be charged by another.
    code, found = examined("--ledger", folder / "ledger.sqlite")
    assert code == 1
    assert "no other run can be added" in found["ledger", "budget"][1]
    for name in ("run.json", "weights.safetensors", "preprocessing.safetensors"):
        whole = (folder / name).read_bytes()
        for damaged in (b"", whole[:-5], b"{}"):
            (folder / name).write_bytes(damaged)
            code, found = examined("--run", folder)
            assert (code, found["run", name][0]) == (1, "problem")
        (folder / name).unlink()
        assert examined("--run", folder)[0] == 1
        (folder / name).write_bytes(whole)
    assert examined("--run", folder)[0] == 0
    assert examined("--run", tmp_path / "nowhere")[0] == 1


def test_a_ledger(tmp_path: Path) -> None:
    book = tmp_path / "book.sqlite"
    assert examined("--ledger", book)[0] == 1
    Ledger(book, Budget(8.0, 1e-5)).close()
    before = book.read_bytes()
    code, found = examined("--ledger", book)
    assert code == 0
    assert found["ledger", "budget"][1].startswith("0 of ε = 8 charged")
    assert book.read_bytes() == before
    with sqlite3.connect(book, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        code, found = examined("--ledger", book)
        other.execute("ROLLBACK")
    other.close()
    assert code == 1
    assert "another process holds it" in found["ledger", "writable"][1]
    assert examined("--ledger", book)[0] == 0
    with sqlite3.connect(book) as db:
        db.execute("UPDATE log SET body = replace(body, '8.0', '9.0')")
    db.close()
    assert examined("--ledger", book)[0] == 1
