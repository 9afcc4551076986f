"""`tacit train --scale-noise`: one charge is one release, also when a run is resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tacit.cli import app, build_data
from tacit.errors import BudgetExceeded
from tacit.ledger import Ledger

DATA = ["--target", "y", "--feature-range", "-5,5", "--scale-noise", "20", "--batch-size", "50"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    x = np.random.default_rng(0).normal(size=(200, 2)).round(3)
    rows = [f"{a},{b},{int(a > 0)}" for a, b in x]
    (tmp_path / "own.csv").write_text("\n".join(["a,b,y", *rows]))
    return tmp_path


def train(folder: Path, name: str, *more: str):
    shared = ["--ledger", str(folder / "book.sqlite"), "--run-name", "r", "--seed", "0"]
    fast = ["--noise-multiplier", "4", "--steps", "3", "--delta", "1e-3", "--quiet"]
    command = ["train", "--data", str(folder / "own.csv"), "--out", str(folder / name)]
    return CliRunner().invoke(app, [*command, *DATA, *shared, *fast, *more])


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each call that reads the records for their mean and std."""
    calls: list[int] = []
    real = build_data.release_statistics

    def watched(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(build_data, "release_statistics", watched)
    return calls


def test_a_resumed_run_does_not_release_again(table: Path, releases) -> None:
    first = train(table, "a")
    assert first.exit_code == 0, first.exception
    again = train(table, "b")
    assert isinstance(again.exception, BudgetExceeded)
    assert "scaling statistics" in str(again.exception)
    assert len(releases) == 1


def test_without_the_claim_they_would_be_released_twice(
    table: Path, releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "claim", lambda self, event, what, key: None)
    train(table, "a")
    train(table, "b")
    assert len(releases) == 2


def test_what_would_not_be_scaled_alike_is_refused(table: Path) -> None:
    query = ["--query", "batch-clip", "--batch-size", "48", "--mini-set-size", "8"]
    public = train(table, "a", *query, "--blocks", "layer", "--layerwise", "enhanced")
    assert "public records would not be scaled" in str(public.exception)
    released = train(table, "a", *query, "--statistics", "released", "--statistics-noise", "9")
    assert "released at the end would not be scaled" in str(released.exception)
