"""Runs that are killed at random moments end within their budget, as good as others."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kill_and_resume import CASES, one_run


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=lambda case: case.name)
def test_a_run_that_is_killed_again_and_again_ends_as_others_do(case, tmp_path):
    alone = one_run(case, tmp_path / "alone", lambda: 0.0, 0)
    chance = random.Random(3)
    killed = one_run(case, tmp_path / "killed", lambda: chance.uniform(0.1, 0.5), 5)
    assert killed["kills"] >= 3
    assert alone["wrong"] == killed["wrong"] == []
    assert killed["lost"] <= killed["kills"] * killed["lease"]
    assert killed["epsilon"] == pytest.approx(alone["epsilon"])
    assert killed["accuracy"] > alone["accuracy"] - 0.1
    assert any("resumed from a checkpoint" in note for note in killed["notes"])
