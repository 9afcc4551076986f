"""`tacit inspect` and `tacit train --query clipless`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.cli import app


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_the_table_has_a_row_a_layer() -> None:
    result = run("inspect", "--model", "lipschitz-mlp")
    assert result.exit_code == 0, result.exception
    assert result.stdout.count("Spectral") == 2
    assert "50.0%" in result.stdout


def test_json_and_the_clip() -> None:
    free = json.loads(run("inspect", "--gradient-clip", "0", "--temperature", "1", "--json").stdout)
    half = json.loads(
        run("inspect", "--gradient-clip", "0.5", "--temperature", "1", "--json").stdout
    )
    assert free["total"] == pytest.approx(2.0, rel=1e-2)
    assert half["total"] == pytest.approx(0.5 * 2**0.5, rel=1e-2)


def test_a_clipless_run_ends_with_a_certificate(tmp_path: Path) -> None:
    result = run(
        "train", "--query", "clipless", "--steps", "5", "--batch-size", "300", "--delta", "1e-4",
        "--adaptive-quantile", "0.5", "--quiet", "--json", "--out", str(tmp_path),
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    facts = json.loads(result.stdout)
    assert facts["certificate"]["certified_accuracy"][0]["share"] == pytest.approx(
        facts["accuracy"], abs=0.01
    )
    assert len(facts["config"]["used"]["thresholds"][0]) == 6
    assert (tmp_path / "certified.png").exists()


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    result = run("train", "--query", "clipless", "--engine", "per-record", "--out", str(tmp_path))
    assert "per-record" in str(result.exception)
    result = run(
        "train", "--query", "clipless", "--gradient-clip", "0", "--adaptive-quantile", "0.5",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert "sets no limit to start from" in str(result.exception)
