"""`tacit report` and `tacit compare`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.cli import app

QUICK = ["--dataset", "digits", "--query", "clip", "--steps", "3", "--epsilon", "3"]


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.exception
    return " ".join(result.stdout.split())


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, ValueError)
    return str(result.exception)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "x"
    call("train", *QUICK, "--delta", "1e-4", "--out", folder, "--quiet")
    return folder


def test_a_run_becomes_a_page(folder: Path, tmp_path: Path) -> None:
    assert "report.html" in call("report", folder)
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "digits · classification" in text
    assert "privacy.epsilon" in text
    other = tmp_path / "other.html"
    call("report", folder, "--out", other)
    assert other.read_text(encoding="utf-8") == text


def test_runs_are_compared(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    call("compare", folder, folder, "--out", out)
    assert "x (2)" in out.read_text(encoding="utf-8")


def test_a_page_of_an_earlier_run_does_not_stay(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    roomy = ["--noise-multiplier", "40", "--delta", "1e-4", "--out", folder, "--quiet"]
    call("train", *QUICK, *roomy)
    call("report", folder)
    (folder / "diagnostics.json").write_text("{}")
    (folder / "own.txt").write_text("kept")
    ledger = tmp_path / "big.sqlite"
    call("ledger", "create", ledger, "--epsilon", "9", "--delta", "1e-4")
    call("train", *QUICK, *roomy, "--overwrite", "--ledger", ledger)
    assert not (folder / "report.html").exists()
    assert not (folder / "diagnostics.json").exists()
    assert (folder / "own.txt").exists()


def test_mistakes_are_named(folder: Path, tmp_path: Path) -> None:
    assert "has no run.json" in refused("report", tmp_path)
    assert "is a folder" in refused("report", folder, "--out", tmp_path)
    assert "2 to 12 runs" in refused("compare", folder)
    (tmp_path / "run.json").write_text("{}")
    assert "is damaged" in refused("compare", folder, tmp_path, "--out", tmp_path / "x.html")


@pytest.mark.parametrize("query", ["clip", "clipless"])
def test_gradient_norms_are_recorded_on_request_and_marked(query: str, tmp_path: Path) -> None:
    how = ["--query", query, "--steps", "4", "--epsilon", "3", "--delta", "1e-4", "--seed", "1"]
    for name, more in (("plain", []), ("seen", ["--diagnostics"])):
        result = CliRunner().invoke(
            app, ["train", *how, *more, "--quiet", "--out", str(tmp_path / name)]
        )
        assert result.exit_code == 0, result.exception
        assert ("they are not private" in result.stderr) == (name == "seen")
        call("report", tmp_path / name)
    plain, seen = ((tmp_path / name) for name in ("plain", "seen"))
    assert not (plain / "diagnostics.json").exists()
    weights = [(folder / "weights.safetensors").read_bytes() for folder in (plain, seen)]
    assert weights[0] == weights[1]  # measuring changes nothing
    stored = json.loads((seen / "diagnostics.json").read_text())
    assert "not private" in stored["notice"]
    (measured,) = stored["measurements"]
    assert measured["private"]
    assert [point["step"] for point in measured["points"]] == [0, 1, 2, 3, 4]
    assert all((p["clipped"] is None) == (query == "clipless") for p in measured["points"])
    notes = json.loads((seen / "run.json").read_text())["notes"]
    assert any("read raw gradients of the training records" in note for note in notes)
    page, other = ((f / "report.html").read_text(encoding="utf-8") for f in (seen, plain))
    assert "This page holds figures that are not private" in page
    assert ("Clipping rate" in page) == (query == "clip")
    assert "This page holds figures that are not private" not in other


def test_gradient_norms_of_single_records_go_with_queries_that_bound_them(tmp_path: Path) -> None:
    how = ["--query", "batch-clip", "--model", "linear", "--diagnostics", "--out", tmp_path / "x"]
    assert "which bounds mini-sets, not records" in refused("train", *how)
    assert not (tmp_path / "x").exists()
