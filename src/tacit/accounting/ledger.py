"""The ledger: the only place that writes `.grad`, and it charges first.

Rules, each decided inside one write transaction, so that processes cannot overspend together:

1. A run's plan is fixed when it begins. Its own ε is by PLD, which is valid for a fixed plan,
   and its number of steps is limited to what its budget allows.
2. A second run is chosen after looking at the first, so runs together are held to the ledger's
   budget by an RDP filter (see `filter`), at one order fixed when the first run begins.
3. A first run whose planned RDP would not pass the filter may still run, held to the ledger's
   budget by PLD alone; but then it is *exclusive*: no other run is ever let in. The filter holds
   in all outcomes or PLD does; letting the outcome choose between the two would prove neither.
4. Events are charged in leases, durably, before their noise is drawn. A crash wastes at most one
   lease. What is left of a lease is given back when the ledger is closed in good order.
5. All batches of one shuffled epoch are one event; every other step is an event of its own.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

import dp_accounting as dpa
import numpy as np
from torch import nn

from tacit.accounting.filter import allowance, best_order
from tacit.accounting.ledger_claims import acknowledge, require_one_more, require_unclaimed
from tacit.accounting.ledger_statement import Statement, statement_in
from tacit.accounting.ledger_store import LedgerStore, RunRow
from tacit.accounting.plan import Plan
from tacit.accounting.rdp import ORDERS, renyi_curve
from tacit.budget import Budget
from tacit.errors import BudgetExceeded, PlanChanged
from tacit.private_gradient import PrivateGradient
from tacit.process_lock import ProcessLock

DEFAULT_LEASE_STEPS = 64


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
        self._pid = os.getpid()
        self._run_id: int | None = None
        self._plan: Plan | None = None
        self._own_limit, self._lease = 0, 0
        self._life = 0, 0
        self._released = 0
        self._occasions: set[Hashable] = set()
        self._owner = threading.get_ident()
        self._lock = ProcessLock()

    @property
    def identity(self) -> str:
        values = self.budget.epsilon, self.budget.delta, self.budget.relation.value
        return hashlib.sha256(repr(values).encode()).hexdigest()

    @property
    def path(self) -> os.PathLike[str] | None:
        return self._store.path

    def begin(self, plan: Plan, *, name: str | None = None, budget: Budget | None = None) -> None:
        """Start a run, or go on with the run of that name if its plan is the same.

        `budget` is the run's own, at most the ledger's. What a crashed run had been charged
        stays charged; going on with it uses what is left. What comes before the first step
        (`plan.prelude`) is charged here: release it after this call, not before.
        """
        with self._lock:
            self._begin(plan, name, budget or self.budget)

    def _begin(self, plan: Plan, name: str | None, own: Budget) -> None:
        if os.getpid() == self._pid:
            self._mind_owner()
        self.end()
        if plan.relation is not self.budget.relation or own.relation is not self.budget.relation:
            raise ValueError(
                f"the run is for {plan.relation}, the ledger for {self.budget.relation}; "
                "give both the same relation"
            )
        limit = self._event_limit(plan, own)
        if plan.prelude and limit == 0:
            raise BudgetExceeded(
                "what comes before the first step leaves no budget for any step; nothing is charged"
            )
        base = renyi_curve(plan.event_of_count(0), plan.accounted_relation)
        event = renyi_curve(plan.step_event, plan.accounted_relation)
        with self._store.transaction():
            runs = self._store.runs()
            same = next((run for run in runs if run.name == name), None)
            if same is None:
                run_id = self._admit(name, plan, limit, runs, base, event)
            elif same.plan == plan:
                run_id = same.id
            else:
                raise PlanChanged(
                    f"run {name!r} began with {same.plan}, not {plan}; give the new run "
                    "a name of its own"
                )
            acknowledge(self._store, run_id, plan)
            beginning = self._store.add_beginning(run_id)
        self._owner = threading.get_ident()
        self._run_id, self._plan, self._own_limit = run_id, plan, limit
        self._life = run_id, beginning

    def release(self, private: PrivateGradient, into: nn.Module) -> None:
        """Charge a step, then draw its noise and set `.grad`; or refuse with BudgetExceeded.

        A refusal draws no noise and leaves `.grad` as it was.
        """
        private.uncovered(into)  # raises where the release could not succeed
        with self._lock:
            self._charge(private)
            self._released += 1
            private.draw_into(into, self.identity, *self._life, self._released)

    def _charge(self, private: PrivateGradient) -> None:
        self._mind_forks()
        if private.plan != self._plan:
            if self._plan is not None:
                raise PlanChanged(
                    f"this run planned {self._plan}, and was handed {private.plan}; a run's noise, "
                    "sampling and relation are fixed when it begins: begin another run"
                )
            self.begin(private.plan)
        if private.occasion is None or private.occasion not in self._occasions:
            if self._lease <= 0:
                # An epoch is charged when it begins: whether there will be another is not known.
                wanted = self.lease_steps if private.occasion is None else 1
                self._lease = self._take_lease(wanted)
            self._lease -= 1
            if private.occasion is not None:
                self._occasions.add(private.occasion)

    def claim(self, event: dpa.GaussianDpEvent, what: str) -> None:
        """Take, for the release `what`, a Gaussian that the run's plan has in its prelude.

        It was charged when the run began; here it is put on disk that it is used. A run releases
        each `what` once, whoever goes on with it: what crashes after its claim has used it.
        """
        with self._own_transaction():
            run_id, plan = self._planned(event, what)
            require_unclaimed(event, what, plan, self._store.claims(run_id))
            self._store.add_claim(run_id, what, event.noise_multiplier)

    def claim_next(self, event: dpa.GaussianDpEvent, what: str) -> str:
        """Claim one more such Gaussian of the run's plan, and say under which name.

        However many the plan has of this multiplier, so many releases there are in the life of the
        run, whichever processes make them. Once it is made, `name_claim` says which value it was.
        """
        with self._own_transaction():
            run_id, plan = self._planned(event, what)
            held = self._store.claims(run_id)
            require_one_more(event, what, plan, held)
            name = f"{what}, claim {len(held) + 1}"
            self._store.add_claim(run_id, name, event.noise_multiplier)
        return name

    def name_claim(self, claim: str, name: str) -> None:
        """The value of that claim, so that the run knows it when it is handed in (`Release`)."""
        with self._own_transaction():
            assert self._run_id is not None
            if name not in self._store.claims(self._run_id):
                self._store.rename_claim(self._run_id, claim, name)

    def require_unclaimed(self, event: dpa.GaussianDpEvent, what: str) -> None:
        """Raise what `claim` would raise, and take nothing."""
        with self._own_transaction():
            run_id, plan = self._planned(event, what)
            require_unclaimed(event, what, plan, self._store.claims(run_id))

    def run_status(self) -> tuple[int, int]:
        """Of the current run: events charged, less what this process has left of its lease, and
        the most there can be. Another process's lease counts as used."""
        run = self._current()
        return run.charged - self._lease, min(run.event_limit, self._own_limit)

    def planned_events(self) -> int:
        """The most that the current run may take, as it was fixed when the run first began.

        A smaller budget that it is gone on with stops it earlier, in view of what was released, so
        its guarantee is still that of all of these.
        """
        return self._current().event_limit

    def life(self) -> tuple[int, int]:
        """Of the current run: its number on this ledger, and how often it has begun, from 1.

        Counted within the transaction that lets the run in, so no two beginnings agree, whichever
        processes they are in and however much is given back. (1, 1) is the first of all.
        """
        self._mind_forks()
        if self._run_id is None:
            raise ValueError("no run has begun; begin one, or release a gradient")
        return self._life

    def end(self) -> None:
        """End the current run in good order: the unused part of its lease is given back.

        Any thread may end it. It is forgotten first: interrupted after the commit, a second end
        gives nothing back again, and interrupted before it, the lease is spent.
        """
        with self._lock:
            run_id, lease, own = self._run_id, self._lease, os.getpid() == self._pid
            self._forget()
            if run_id is not None and own:
                with self._store.transaction():
                    self._store.add_charge(run_id, -lease)
                    self._store.drop_if_nothing_was_released(run_id)

    def close(self) -> None:
        with self._lock:
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
        with self._lock:
            return statement_in(self._store)

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._run_id, self._plan = None, None
        self._own_limit, self._lease = 0, 0
        self._life = 0, 0
        self._released = 0
        self._occasions = set()

    def _mind_forks(self) -> None:
        """The parent's lease, and the epochs it paid for, are the parent's."""
        if os.getpid() != self._pid:
            self._pid, self._lease = os.getpid(), 0
            self._occasions = set()

    def _mind_owner(self) -> None:
        """A run that another thread began is not ended by this one: it would be told a wrong ε.

        Steps of one run may come from several threads; each is charged.
        """
        other = self._owner != threading.get_ident()
        # Not Thread.is_alive(), which is always true of threads that Python did not start.
        if self._run_id is not None and other and self._owner in sys._current_frames():
            raise RuntimeError(
                "the ledger has a run that another thread began; end it first with ledger.end() "
                "(claims stay), or open the ledger's file again in this thread"
            )

    @contextmanager
    def _own_transaction(self) -> Iterator[None]:
        with self._lock:
            self._mind_forks()
            with self._store.transaction():
                yield

    def _current(self) -> RunRow:
        with self._own_transaction():
            run = next((r for r in self._store.runs() if r.id == self._run_id), None)
        if run is None:
            raise ValueError("no run has begun; begin one, or release a gradient")
        return run

    def _planned(self, event: dpa.GaussianDpEvent, what: str) -> tuple[int, Plan]:
        """The current run, which must have such an event in its plan's prelude."""
        if self._run_id is None or self._plan is None or event not in self._plan.prelude:
            raise PlanChanged(
                f"{what}: the release costs {event}, and the ledger's current run did not plan for "
                "that; give it to the Trainer, or begin a run with it in Plan(prelude=...)"
            )
        return self._run_id, self._plan

    def _event_limit(self, plan: Plan, own: Budget) -> int:
        """How many events the run may take on its own: by plan, its budget and the ledger's."""
        steps = plan.steps
        for budget in {own, self.budget}:
            if steps is not None and plan.epsilon(steps, budget.delta) <= budget.epsilon:
                continue
            allowed = plan.steps_within(budget)
            steps = allowed if steps is None else min(steps, allowed)
        assert steps is not None
        return plan.scheme.num_events(steps)

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
            whole = base + event * limit if limit else base
            self._store.set_order(best_order(whole, self.budget))
        at = ORDERS.index(self._order())
        row = RunRow(0, "", "", plan, limit, False, float(base[at]), float(event[at]))
        room = self._room(others)
        if others and row.cost(0) > room:
            raise BudgetExceeded(
                "what comes before the first step would pass the ledger's budget of epsilon "
                f"{self.budget.epsilon:g}, with the runs that it holds; nothing is charged"
            )
        row = replace(row, exclusive=not others and row.cost(limit) > room)
        return self._store.add_run(name, row)

    def _order(self) -> float:
        held = self._store.budget()
        assert held is not None
        assert held[1] is not None
        return held[1]

    def _room(self, others: list[RunRow]) -> float:
        """The RDP that the filter has left, at the ledger's order, beside these runs."""
        return allowance(self._order(), self.budget) - math.fsum(run.cost() for run in others)

    def _take_lease(self, wanted: int) -> int:
        """Charge up to `wanted` events; at least one, or BudgetExceeded."""
        assert self._run_id is not None
        with self._store.transaction():
            runs = self._store.runs()
            run = next((r for r in runs if r.id == self._run_id), None)
            if run is None or run.plan != self._plan:
                raise PlanChanged("another process ended this run; begin it again")
            limit = min(run.event_limit, self._own_limit)
            events = min(wanted, limit - run.charged)
            if not run.exclusive:
                room = self._room([r for r in runs if r.id != run.id])
                while events > 0 and run.cost(run.charged + events) > room:
                    events -= 1
            if events <= 0:
                raise BudgetExceeded(
                    f"one more step of run {run.name!r} would pass its budget: {run.charged} of at "
                    f"most {limit} are charged, in a ledger for epsilon {self.budget.epsilon:g} at "
                    f"delta {self.budget.delta:g}; nothing was released"
                )
            self._store.add_charge(run.id, events)
        return events
