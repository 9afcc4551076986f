"""The ledger: the only place that writes `.grad`, and it charges first.

Rules, each decided inside one write transaction, so that processes cannot overspend together:

1. A run's plan is fixed when it begins. Its own ε is by PLD, which is valid for a fixed plan,
   and its number of steps is limited to what its budget allows.
2. A second run is chosen after looking at the first, so runs together are held to the ledger's
   budget by an RDP filter (see `filter`), at one order fixed when the first run begins.
3. A first run whose planned RDP would not pass the filter may still run, held to the ledger's
   budget by PLD alone; but then it is *exclusive*: no other run is ever let in. The filter holds
   in all outcomes or PLD does; letting the outcome choose between the two would prove neither.
4. Steps are charged in leases, durably, before their noise is drawn. A crash wastes at most one
   lease. What is left of a lease is given back when the ledger is closed in good order.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from torch import nn

from tacit.accounting.filter import allowance, best_order, epsilon_at
from tacit.accounting.ledger_store import LedgerStore, RunRow
from tacit.accounting.plan import Plan
from tacit.accounting.rdp import ORDERS, renyi_curve
from tacit.budget import Budget
from tacit.errors import BudgetExceeded, PlanChanged
from tacit.private_gradient import PrivateGradient

DEFAULT_LEASE_STEPS = 64


@dataclass(frozen=True)
class RunCharge:
    """What one run has been charged for. ε is by PLD, at the ledger's δ."""

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
    """All runs over one dataset, and what they amount to together.

    `epsilon` is the total that a reader may rely on: of one run alone by PLD, of several by the
    RDP filter. `method` says which.
    """

    budget: Budget
    runs: tuple[RunCharge, ...]
    epsilon: float
    method: str


class Ledger:
    """Charges privacy before it is spent, in one SQLite file for all runs over the same data.

    `path=None` keeps it in memory, for one process. The budget is written once and must be the
    same ever after; leave it out to open a file that has one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        budget: Budget | None = None,
        *,
        lease_steps: int = DEFAULT_LEASE_STEPS,
    ) -> None:
        if lease_steps < 1:
            raise ValueError(f"lease_steps is {lease_steps}; give at least 1")
        self.lease_steps = lease_steps
        if budget is None and (path is None or not os.path.exists(path)):
            raise ValueError(f"no ledger at {path}; give a budget to make a new one")
        self._store = LedgerStore(path)
        with self._store.transaction():
            held = self._store.budget()
            if held is None:
                if budget is None:
                    raise ValueError(f"{path} holds no budget; give one")
                self._store.set_budget(budget)
                self.budget = budget
            elif budget is not None and budget != held[0]:
                raise ValueError(
                    f"the ledger at {path} was made for {held[0]}, not {budget}; open it without "
                    "a budget, or keep another ledger for other data"
                )
            else:
                self.budget = held[0]
        self._run_id: int | None = None
        self._plan: Plan | None = None
        self._lease = 0

    @property
    def path(self) -> os.PathLike[str] | None:
        return self._store.path

    def begin(self, plan: Plan, *, name: str | None = None, budget: Budget | None = None) -> None:
        """Start a run, or go on with the run of that name if its plan is the same.

        `budget` is the run's own, at most the ledger's. What a crashed run had been charged
        stays charged; going on with it uses what is left.
        """
        self.end()
        own = budget or self.budget
        if plan.relation is not self.budget.relation or own.relation is not self.budget.relation:
            raise ValueError(
                f"the run is for {plan.relation}, the ledger for {self.budget.relation}; "
                "give both the same relation"
            )
        limit = self._step_limit(plan, own)
        base = renyi_curve(plan.event(0), plan.accounted_relation)
        event = renyi_curve(plan.step_event, plan.accounted_relation)
        with self._store.transaction():
            runs = self._store.runs()
            same = next((run for run in runs if run.name == name), None)
            if same is not None:
                if same.plan != plan:
                    raise PlanChanged(
                        f"run {name!r} began with {same.plan}, not {plan}; give the new run "
                        "a name of its own"
                    )
                self._run_id = same.id
            else:
                self._run_id = self._admit(name, plan, limit, runs, base, event)
        self._plan = plan

    def release(self, private: PrivateGradient, into: nn.Module) -> None:
        """Charge a step, then draw its noise and set `.grad`; or refuse with BudgetExceeded.

        A refusal draws no noise and leaves `.grad` as it was.
        """
        private.uncovered(into)  # raises where the release could not succeed
        if self._store.reconnect_after_fork():
            self._lease = 0  # the parent's lease is the parent's
        if private.plan != self._plan:
            if self._plan is not None:
                raise PlanChanged(
                    f"this run planned {self._plan}, and was handed {private.plan}; a run's noise, "
                    "sampling and relation are fixed when it begins: begin another run"
                )
            self.begin(private.plan)
        if self._lease == 0:
            self._lease = self._take_lease()
        self._lease -= 1
        private.draw_into(into)

    def run_status(self) -> tuple[int, int]:
        """Of the current run: steps released, by whichever process, and the most there can be."""
        run = next((r for r in self._store.runs() if r.id == self._run_id), None)
        if run is None:
            raise ValueError("no run has begun; begin one, or release a gradient")
        return run.charged - self._lease, run.step_limit

    def end(self) -> None:
        """End the current run in good order: the unused part of its lease is given back."""
        if self._run_id is not None and not self._store.reconnect_after_fork():
            with self._store.transaction():
                self._store.add_charge(self._run_id, -self._lease)
                self._store.drop_if_nothing_was_released(self._run_id)
        self._lease, self._run_id, self._plan = 0, None, None

    def close(self) -> None:
        self.end()
        self._store.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("a ledger cannot be copied or pickled; open its file again instead")

    def statement(self) -> Statement:
        """Every run and the total. Reading it costs nothing."""
        self._store.reconnect_after_fork()
        rows = self._store.runs()
        delta = self.budget.delta
        runs = tuple(
            RunCharge(
                name=row.name,
                started=row.started,
                steps=row.charged,
                step_limit=row.step_limit,
                epsilon=row.plan.epsilon(row.charged, delta),
                epsilon_planned=row.plan.epsilon(row.step_limit, delta),
                exclusive=row.exclusive,
                plan=row.plan,
            )
            for row in rows
        )
        if len(runs) <= 1:
            return Statement(self.budget, runs, sum(run.epsilon for run in runs), "PLD")
        order = self._order()
        spent = math.fsum(row.cost() for row in rows)
        total = epsilon_at(order, spent, self.budget)
        return Statement(self.budget, runs, total, f"RDP filter at order {order:g}")

    def _step_limit(self, plan: Plan, own: Budget) -> int:
        """How many steps the run may take on its own: by its plan, its budget and the ledger's."""
        limit = plan.steps
        for budget in {own, self.budget}:
            if limit is not None and plan.epsilon(limit, budget.delta) <= budget.epsilon:
                continue
            allowed = plan.steps_within(budget)
            limit = allowed if limit is None else min(limit, allowed)
        assert limit is not None
        return limit

    def _admit(
        self,
        name: str | None,
        plan: Plan,
        limit: int,
        others: list[RunRow],
        base: np.ndarray,
        event: np.ndarray,
    ) -> int:
        """Rules 2 and 3: let the run in, alone or under the filter, or refuse it."""
        owner = next((run for run in others if run.exclusive), None)
        if owner is not None:
            raise BudgetExceeded(
                f"run {owner.name!r} took the whole budget of this ledger "
                f"(epsilon {self.budget.epsilon:g}); no other run can be let in. To make room for "
                "several runs, make the ledger with a larger budget than the first run's"
            )
        if not others:
            whole = base + event * plan.scheme.num_events(limit) if limit else base
            self._store.set_order(best_order(whole, self.budget))
        order = self._order()
        at = ORDERS.index(order)
        row = RunRow(0, "", "", plan, limit, False, float(base[at]), float(event[at]), 0)
        fits = row.cost(limit) <= allowance(order, self.budget)
        return self._store.add_run(
            name,
            plan,
            step_limit=limit,
            exclusive=not others and not fits,
            base_cost=row.base_cost,
            event_cost=row.event_cost,
        )

    def _order(self) -> float:
        held = self._store.budget()
        assert held is not None
        assert held[1] is not None
        return held[1]

    def _take_lease(self) -> int:
        """Charge up to `lease_steps` steps; at least one, or BudgetExceeded."""
        with self._store.transaction():
            runs = self._store.runs()
            run = next((r for r in runs if r.id == self._run_id), None)
            if run is None:
                raise PlanChanged("another process ended this run; begin it again")
            steps = min(self.lease_steps, run.step_limit - run.charged)
            if not run.exclusive:
                others = math.fsum(r.cost() for r in runs if r.id != run.id)
                room = allowance(self._order(), self.budget) - others
                while steps > 0 and run.cost(run.charged + steps) > room:
                    steps -= 1
            if steps <= 0:
                raise BudgetExceeded(
                    f"step {run.charged + 1} of run {run.name!r} would pass its budget: "
                    f"{run.charged} of at most {run.step_limit} steps are charged, in a ledger for "
                    f"epsilon {self.budget.epsilon:g} at delta {self.budget.delta:g}; nothing "
                    "was released"
                )
            self._store.add_charge(run.id, steps)
        return steps
