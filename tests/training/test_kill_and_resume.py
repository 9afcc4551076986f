"""Runs that are killed at random moments end within their budget, as good as others."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kill_and_resume import CASES, one_run, records


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=lambda case: case.name)
def test_a_run_that_is_killed_again_and_again_ends_as_others_do(case, tmp_path):
    (tmp_path / "alone").mkdir()
    trainer = case.trainer(tmp_path / "alone")
    begun = time.monotonic()
    alone = trainer.fit()  # in this process: those that are forked find its accounting done
    seconds = time.monotonic() - begun
    accuracy = alone.evaluate(records(1, 4000)).accuracy
    chance = random.Random(3)
    killed = one_run(case, tmp_path / "killed", lambda: seconds * chance.uniform(0.2, 0.5), 5)
    assert killed["kills"] >= 1
    assert killed["wrong"] == []
    assert killed["lost"] <= killed["kills"] * killed["lease"]
    assert killed["epsilon"] == pytest.approx(alone.epsilon)
    assert killed["accuracy"] > accuracy - 0.1
    if killed["kills"] >= 2:
        assert any("resumed from a checkpoint" in note for note in killed["notes"])
