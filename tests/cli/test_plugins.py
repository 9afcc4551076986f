"""`tacit --plugin`: what a user's own file registers can be named on the command line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tacit
from tacit.cli import app

FAST = ["--steps", "2", "--delta", "1e-4", "--quiet", "--json", "--batch-size", "60"]
OWN_LOSS = """
from dataclasses import dataclass
from typing import ClassVar

import tacit
from tacit.losses import LipschitzLoss, Task


@tacit.register_loss("softer-hinge")
@dataclass(frozen=True)
class SofterHinge(LipschitzLoss):
    task: ClassVar[Task | None] = Task.CLASSIFICATION
    beta: float = 0.5

    def lipschitz_for(self, num_outputs):
        return self.beta * tacit.losses.MulticlassHinge().lipschitz_for(num_outputs)

    def per_record(self, outputs, targets):
        return self.beta * tacit.losses.MulticlassHinge().per_record(outputs, targets)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "own_loss.py"
    file.write_text(OWN_LOSS)
    return file


@pytest.mark.parametrize("query", ["clip", "clipless"])
def test_a_loss_of_ones_own_file_trains(plugin: Path, tmp_path: Path, query: str) -> None:
    train = ["train", *FAST, "--query", query, "--loss", "softer-hinge", "--beta", "0.25"]
    result = CliRunner().invoke(
        app, ["--plugin", str(plugin), *train, "--out", str(tmp_path / "run")]
    )
    assert result.exit_code == 0, result.exception
    used = json.loads(result.stdout)["config"]["used"]
    assert used["loss"] == "SofterHinge(beta=0.25)"
    digest = hashlib.sha256(plugin.read_bytes()).hexdigest()
    assert f"file {plugin}, sha256 {digest}" in used["plugins"]
    again = tacit.losses.loss_named(used["loss_name"], **used["loss_numbers"])
    assert repr(again) == used["loss"]
    tacit.losses.check_loss(again, 10, steps=10)


def test_without_its_plugin_a_name_is_unknown(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--loss", "unheard-of", "--out", str(tmp_path)])
    assert "registered with @tacit.register_loss" in str(result.exception)


@pytest.mark.parametrize("name", ["no_such_file.py", "no_such_module_at_all"])
def test_a_plugin_that_is_missing_is_named(name: str) -> None:
    result = CliRunner().invoke(app, ["--plugin", name, "data"])
    assert isinstance(result.exception, ValueError)
    assert name in str(result.exception)
