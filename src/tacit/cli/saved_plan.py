"""What a saved run released, read back from its run.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tacit.accounting.plan import Plan


@dataclass(frozen=True)
class SavedPlan:
    """A run's plan, how many of its steps the run answers for, and its δ and ε."""

    plan: Plan
    steps: int
    delta: float
    epsilon: float


def read_plan(folder: Path) -> SavedPlan:
    """The plan of the run in `folder`, or an error that says what is missing."""
    file = folder / "run.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} has no run.json; give the folder of a run, as tacit train --out makes it"
        )
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        written = facts["plan"] if "plan" in facts else facts["config"]["used"]["plan"]
        plan = Plan.from_json(written)
        # A run that its budget ended answers for the steps it took, any other for its whole plan.
        taken = int(facts["steps"])
        steps = taken if facts["stopped"] == "budget" or plan.steps is None else plan.steps
        return SavedPlan(plan, steps, float(facts["delta"]), float(facts["epsilon"]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} does not hold a run's plan ({type(error).__name__}: {error}); "
            "in Python: tacit.trade_off(noise_multiplier, sampling, steps)"
        ) from error
