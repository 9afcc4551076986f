"""What a ledger's runs amount to, and how much of that is a guarantee."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from tacit.accounting.filter import epsilon_at
from tacit.accounting.ledger_file import copied
from tacit.accounting.ledger_store import LedgerStore, RunRow
from tacit.accounting.plan import Plan
from tacit.budget import Budget


@dataclass(frozen=True)
class RunCharge:
    """What one run has been charged for, by PLD at the ledger's δ.

    `epsilon` is of the steps charged so far; `epsilon_planned`, of all that the run may take, is
    what holds when it was stopped by somebody who had looked.
    """

    name: str
    started: str
    steps: int
    step_limit: int
    epsilon: float
    epsilon_planned: float
    exclusive: bool
    plan: Plan


@dataclass(frozen=True)
class Statement:
    """All runs over one dataset.

    `epsilon` is the guarantee: of one run, that of its whole plan; of several, the ledger's
    budget, which the filter keeps in every outcome. `epsilon_charged` is what the steps charged
    so far add up to: it shows how much is left, and is not itself a guarantee, because when to
    stop may have been chosen by looking. `method` says how it was added up.
    """

    budget: Budget
    runs: tuple[RunCharge, ...]
    epsilon: float
    epsilon_charged: float
    method: str


def statement_of(budget: Budget, order: float | None, rows: list[RunRow]) -> Statement:
    runs = tuple(_charge(row, budget.delta) for row in rows)
    if not runs:
        return Statement(budget, runs, 0.0, 0.0, "nothing was released")
    if len(runs) == 1:
        return Statement(budget, runs, runs[0].epsilon_planned, runs[0].epsilon, "PLD")
    assert order is not None
    charged = epsilon_at(order, math.fsum(row.cost() for row in rows), budget)
    return Statement(budget, runs, budget.epsilon, charged, f"RDP filter at order {order:g}")


def _charge(row: RunRow, delta: float) -> RunCharge:
    return RunCharge(
        name=row.name,
        started=row.started,
        steps=row.plan.scheme.steps_within(row.charged),
        step_limit=row.plan.scheme.steps_within(row.event_limit),
        epsilon=row.plan.epsilon_of_count(row.charged, delta),
        epsilon_planned=row.plan.epsilon_of_count(row.event_limit, delta),
        exclusive=row.exclusive,
        plan=row.plan,
    )


def read_statement(path: str | os.PathLike[str]) -> Statement:
    """Every run of the ledger at `path` and the total, without a change to any file there.

    Raises ValueError where there is no ledger.
    """
    with copied(path) as copy:
        store = LedgerStore(copy)
        with store.transaction():
            if store.budget() is None:
                raise ValueError(f"{path} holds no budget, so nothing was spent from it")
        return statement_in(store)


def statement_in(store: LedgerStore) -> Statement:
    with store.transaction():
        held = store.budget()
        rows = store.runs()
    assert held is not None
    return statement_of(*held, rows)
