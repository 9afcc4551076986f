"""`tacit search`: a folder with a run, its study and its ledger; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.ledger import read_statement

optuna = pytest.importorskip("optuna")

FAST = [
    "search", "--steps", "4", "--epsilon", "3", "--delta", "1e-4", "--quiet", "--json",
    "--trials", "3", "--trial-steps", "2",
]  # fmt: skip


def search(folder: Path, *arguments: str):
    return CliRunner().invoke(app, [*FAST, "--out", str(folder), *arguments])


def test_a_search_is_a_run_whose_epsilon_counts_its_trials(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    worker = search(folder, "--worker")
    assert worker.exit_code == 0, worker.exception
    assert not (folder / "run.json").exists()
    done = search(folder)
    assert done.exit_code == 0, done.exception
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    told = facts["search"]
    assert told["states"] == {"complete": 3}
    assert told["epsilon_uncharged"] < told["epsilon"] == facts["epsilon"] <= 3
    statement = read_statement(folder / "ledger.sqlite")
    assert statement.epsilon == facts["epsilon"]
    assert len(statement.runs[0].claims) == 3
    assert facts["config"]["settings"]["training"]["lr"] == told["settings"]["lr"]
    assert tacit.load_run(folder).facts["epsilon"] == facts["epsilon"]
    again = search(folder)
    assert "holds a finished run" in str(again.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--query", "batch-clip"], "the trials of a search bound single records"),
        (["--noise-multiplier", "2"], "a search calibrates the noise"),
        (["--over", "batch-size"], "--over names batch-size; give some of lr, max-norm"),
        (["--over", "gradient-clip"], "goes with --query clipless"),
        (["--shape", "1"], "--shape goes with --method select"),
        (["--sampling", "shuffle", "--relation", "replace-one"], "Poisson samples"),
    ],
)
def test_what_a_search_does_not_take_is_refused_by_name(tmp_path, arguments, words) -> None:
    refused = search(tmp_path / "s", *arguments)
    assert isinstance(refused.exception, ValueError)
    assert words in str(refused.exception)
    assert not (tmp_path / "s" / "ledger.sqlite").exists()
