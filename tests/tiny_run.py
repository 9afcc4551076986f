"""The smallest thing that releases gradients: one weight, nobody's data, any plan."""

from __future__ import annotations

import torch
from torch import nn

from tacit import Budget, Ledger, PendingRelease, Relation
from tacit.accounting import Plan
from tacit.errors import BudgetExceeded
from tacit.queries import Block, BoundedGradient
from tacit.randomness import Randomness
from tacit.sampling import Poisson
from tacit.sampling.scheme import Unit

torch.set_num_threads(1)

ADD = Relation.ADD_OR_REMOVE_ONE
REPLACE = Relation.REPLACE_ONE


def one_weight() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


def gradient(plan: Plan, model: nn.Module, randomness: Randomness | None = None) -> PendingRelease:
    """What `Mechanism.privatise` returns, for a sum that is zero."""
    weight = model.weight
    block = Block(("weight",), (weight,), (torch.zeros_like(weight),), bound=1.0)
    bounded = BoundedGradient((block,), divisor=1.0, unit=plan.unit)
    sensitivity = bounded.sensitivities(plan.relation)[0]
    std = plan.noise_multiplier * sensitivity
    return PendingRelease(plan, bounded, (std,), randomness or Randomness())


def gaussian_plan(noise_multiplier: float = 10.0, steps: int | None = None, **more) -> Plan:
    """Everybody takes part in every step: the plan that is quickest to account for."""
    return Plan(Poisson(1.0), noise_multiplier, ADD, steps, **more)


def release(ledger: Ledger, plan: Plan, count: int = 1) -> int:
    """Release `count` steps; returns how many there were before the budget ended."""
    model = one_weight()
    for done in range(count):
        try:
            ledger.release(gradient(plan, model), into=model)
        except BudgetExceeded:
            return done
    return count


def log_rows(ledger_path, *kinds: str) -> list[dict]:
    """The bodies of the rows on disk, read by a connection of its own."""
    import json
    import sqlite3

    with sqlite3.connect(ledger_path, timeout=60) as db:
        rows = db.execute("SELECT kind, body FROM log ORDER BY seq").fetchall()
    db.close()
    return [{"kind": kind, **json.loads(body)} for kind, body in rows if kind in kinds]


def charged(ledger_path, name: str | None = None) -> int:
    """Events charged on disk and not returned."""
    total, names = 0, {}
    for row in log_rows(ledger_path, "run", "charge", "return"):
        if row["kind"] == "run":
            names[row["run"]] = row["name"]
        elif name in (None, names[row["run"]]):
            total += row["events"] if row["kind"] == "charge" else -row["events"]
    return total


ROOMY = Budget(epsilon=3.0, delta=1e-5)

__all__ = [
    "ADD",
    "REPLACE",
    "ROOMY",
    "Unit",
    "charged",
    "gaussian_plan",
    "gradient",
    "log_rows",
    "one_weight",
    "release",
]
