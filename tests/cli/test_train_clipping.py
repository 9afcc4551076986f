"""`tacit train` with clipping rules, an adaptive threshold and augmentation."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tacit.cli import app

FAST = ["--steps", "5", "--epsilon", "3", "--delta", "1e-4", "--quiet", "--json", "--seed", "0"]


def train(folder, *arguments):
    return CliRunner().invoke(app, ["train", *FAST, "--out", str(folder), *arguments])


@pytest.mark.parametrize("blocks", ["flat", "layer"])
def test_all_together_and_the_thresholds_are_reported(tmp_path, blocks):
    arguments = ["--rule", "normalise", "--adaptive-quantile", "0.4", "--augment", "2"]
    result = train(tmp_path / "x", *arguments, "--blocks", blocks, "--max-norm", "0.5")
    assert result.exit_code == 0, result.exception
    facts = json.loads(result.stdout)
    paths = facts["config"]["used"]["thresholds"]
    assert {len(path) for path in paths} == {6}
    assert all(path[0] == 0.5 and len(set(path)) == 6 for path in paths)
    assert len(paths) == (1 if blocks == "flat" else 2)
    plain = json.loads(train(tmp_path / "y", "--blocks", blocks).stdout)
    assert facts["epsilon"] == plain["epsilon"]
    assert "thresholds" not in plain["config"]["used"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--adaptive-quantile", "2"], "quantile"),
        (["--augment", "0"], "--augment is 0"),
        (["--augment", "2", "--data", "own.csv", "--target", "y"], "images"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text("a,b,y\n" + "1,2,0\n2,1,1\n" * 50)
    result = train(tmp_path / "x", *arguments)
    assert result.exit_code != 0
    assert says in str(result.exception)
