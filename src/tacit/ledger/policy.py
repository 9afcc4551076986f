"""What the rows of a ledger's log amount to: runs, charges, limits and costs.

The kinds of rows, and what their JSON objects hold:

    ledger     format, epsilon, delta, relation      the first row, and only that
    run        run, name, started, plan, budget      runs are numbered from 1, in order
    attempt    run, attempt, budget                  a run begins or is resumed; numbered from 1
    sampling   run, attempt, fingerprint             the seeded batches that the attempt draws
    charge     run, attempt, events                  charged before their noise is drawn
    return     run, attempt, events                  of the attempt's charges: not used
    claim      run, claim, noise_multiplier[, key]   a Gaussian of the plan's prelude is taken;
                                                     with the digest of its key, repeatably
    name       run, claim, name                      the value that it became (`Release`)
    drop       run                                   the run ended and nothing had been charged

Rows say what was planned and what was charged. How many events a run may take, whether it holds
the ledger alone, the filter's order and all costs are computed from the plans and budgets, never
stored. The rules are in `charge`.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import dp_accounting as dpa

from tacit.accounting.plan import Plan
from tacit.accounting.rdp import ORDERS, allowance, best_order, renyi_curve
from tacit.budget import Budget, Relation
from tacit.errors import BudgetExceeded, PlanChanged
from tacit.sampling.scheme import UnregisteredScheme

FORMAT = 2
_MOST_EVENTS = 10**9


def budget_fields(budget: Budget) -> dict[str, Any]:
    return {
        "epsilon": float(budget.epsilon),
        "delta": float(budget.delta),
        "relation": budget.relation.value,
    }


@lru_cache(maxsize=256)
def event_limit(plan: Plan, own: Budget, ledger: Budget) -> int:
    """How many events the run may take by itself: by its plan, its budget and the ledger's."""
    steps = plan.steps
    for budget in {own, ledger}:
        if steps is not None and plan.epsilon(steps, budget.delta) <= budget.epsilon:
            continue
        allowed = plan.steps_within(budget)
        steps = allowed if steps is None else min(steps, allowed)
    assert steps is not None
    return min(plan.scheme.num_events(steps), _MOST_EVENTS)


@lru_cache(maxsize=256)
def _costs(plan: Plan, order: float) -> tuple[float, float]:
    """RDP at `order` of what comes before the first step, and of one event."""
    at = ORDERS.index(order)
    base = renyi_curve(plan.event_of_count(0), plan.accounted_relation)
    event = renyi_curve(plan.step_event, plan.accounted_relation)
    return float(base[at]), float(event[at])


@lru_cache(maxsize=256)
def _filter(plan: Plan, limit: int, budget: Budget) -> tuple[float, float]:
    """The filter's order for a first run with this plan, and how much RDP it allows at it."""
    whole = renyi_curve(plan.event_of_count(limit), plan.accounted_relation)
    order = best_order(whole, budget)
    return order, allowance(order, budget)


@dataclass
class RunState:
    """One run. Counts are of events, which are steps for all schemes but shuffled epochs."""

    id: int
    name: str
    started: str
    plan_text: str
    budget: Budget
    ledger_budget: Budget
    first: bool  # no other run was on the ledger when it was admitted
    attempts: list[int] = field(default_factory=list)  # events charged and not returned, of each
    claims: dict[str, float] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # of the claims that name one
    dropped: bool = False

    @property
    def charged(self) -> int:
        """Events charged and not returned, in all attempts."""
        return sum(self.attempts)

    @cached_property
    def plan(self) -> Plan:
        """Decoded once. Raises UnregisteredScheme where this process does not know the scheme."""
        return Plan.from_json(self.plan_text)

    @property
    def limit(self) -> int:
        return event_limit(self.plan, self.budget, self.ledger_budget)

    def cost(self, order: float, events: int | None = None) -> float:
        """RDP at `order` of the prelude and of this many events (by default, those charged)."""
        count = self.charged if events is None else events
        base, event = _costs(self.plan, order)
        return base + (event * count if count else 0.0)

    def has_claimed(self, event: dpa.GaussianDpEvent, what: str, key: str) -> bool:
        """Whether `what` was claimed with this Gaussian and the key of this digest."""
        same_noise = self.claims.get(what) == float(event.noise_multiplier)
        return same_noise and self.keys.get(what) == key

    def require_unclaimed(self, event: dpa.GaussianDpEvent, what: str) -> None:
        """Raise BudgetExceeded if `what` is claimed, or every planned Gaussian of this multiplier.

        A claim is the use of one Gaussian of the plan's prelude, for a release made once.
        """
        planned = self.plan.prelude.count(event)
        claimed = list(self.claims.values()).count(float(event.noise_multiplier))
        if what in self.claims or claimed >= planned:
            paid = f"{planned} releases" if claimed == planned > 1 else "a release"
            raise BudgetExceeded(
                f"{what}: what the run was charged for, {paid} of multiplier "
                f"{event.noise_multiplier:g}, has been made; nothing more is let out. Use what was "
                "released then, or begin another run under a name of its own"
            )


class LedgerState:
    """Everything that a ledger knows, from its rows."""

    def __init__(self) -> None:
        self._budget: Budget | None = None  # until the first row
        self.runs: dict[int, RunState] = {}
        self._sampled: dict[str, tuple[int, int]] = {}  # fingerprints: their run and attempt

    @property
    def budget(self) -> Budget:
        assert self._budget is not None
        return self._budget

    def live(self) -> list[RunState]:
        return [run for run in self.runs.values() if not run.dropped]

    def named(self, name: str | None) -> RunState | None:
        return next((run for run in self.live() if run.name == name), None)

    def free_name(self) -> str:
        """A name for a run that was given none."""
        number = len(self.runs) + 1
        while self.named(f"run-{number}") is not None:
            number += 1
        return f"run-{number}"

    # What is computed from the plans.

    def filter(self) -> tuple[float, float]:
        """The filter's order and the RDP that it allows, fixed by the plan of the first run."""
        first = next(run for run in reversed(self.runs.values()) if run.first)
        return _filter(first.plan, first.limit, self.budget)

    def exclusive(self, run: RunState) -> bool:
        """Whether it has the ledger to itself: admitted first, and too large for the filter."""
        if not run.first:
            return False
        order, allowed = self.filter()
        return run.cost(order, run.limit) > allowed

    def room_beside(self, run: RunState | None) -> float:
        """The RDP that the filter has left beside the other runs; BudgetExceeded if it has none.

        Beside all runs, if `run` is None.

        Raises UnregisteredScheme if the cost of one of them cannot be computed here.
        """
        others = [other for other in self.live() if other is not run]
        owner = next((other for other in others if self.exclusive(other)), None)
        if owner is not None:
            raise BudgetExceeded(
                f"run {owner.name!r} took the whole budget of this ledger "
                f"(epsilon {self.budget.epsilon:g}); no other run can be added. To make room for "
                "several runs, make the ledger with a larger budget than the first run's"
            )
        order, allowed = self.filter()
        return allowed - math.fsum(other.cost(order) for other in others)

    def has_room(self, plan: Plan, own: Budget) -> bool:
        """Whether all events of a new run would fit into its own budget and beside the others."""
        if plan.steps is None:
            raise ValueError("the plan has no number of steps; give Plan(steps=...)")
        events = plan.scheme.num_events(plan.steps)
        if event_limit(plan, own, self.budget) < events:
            return False
        if not self.live():
            return True
        room, (order, _) = self.room_beside(None), self.filter()
        base, event = _costs(plan, order)
        return base + event * events <= room

    def events_left(self, run: RunState, wanted: int, limit: int) -> int:
        """How many of the `wanted` events the run may still be charged, within `limit`."""
        events = max(0, min(wanted, limit - run.charged))
        if events == 0 or self.exclusive(run):
            return events
        room, (order, _) = self.room_beside(run), self.filter()
        counts = range(run.charged + 1, run.charged + events + 1)
        return bisect.bisect_right(counts, room, key=lambda count: run.cost(order, count))

    def require_new_batches(self, run: int, attempt: int, fingerprint: str) -> bool:
        """True if these seeded batches are new here, False if this attempt has drawn from them.

        Two attempts that draw the same batches are not two independent samples: who was in a batch
        of one was in the same batch of the other. Their amplification does not compose.
        """
        known = self._sampled.get(fingerprint)
        if known is not None and known != (run, attempt):
            raise PlanChanged(
                f"the sampler's seed was used on this ledger before, by run "
                f"{self.runs[known[0]].name!r}, and its batches would be the same, which is not a "
                "second random sample; give the sampler another seed, or none. Nothing was charged"
            )
        return known is None

    # Replay. Whatever a row should not say raises ValueError, TypeError or KeyError.

    def apply(self, kind: str, body: dict[str, Any]) -> None:
        if (kind == "ledger") != (self._budget is None):
            raise ValueError("the first row, and only that, holds the budget")
        if kind == "ledger":
            if body.pop("format") != FORMAT:
                raise ValueError("it is of another format")
            self._budget = _budget(body)
            return
        number = _count(body.pop("run"))
        if kind == "run":
            self._add_run(number, **body)
            return
        run = self.runs[number]
        if run.dropped:
            raise ValueError(f"run {number} was dropped before")
        _CHANGES[kind](self, run, **body)

    def _add_run(self, number: int, name: str, started: str, plan: Any, budget: Any) -> None:
        if number != len(self.runs) + 1 or self.named(_text(name)) is not None:
            raise ValueError(f"run {number} {name!r} is not new")
        own, text = _budget(budget), json.dumps(plan, sort_keys=True)
        if own.relation is not self.budget.relation:
            raise ValueError(f"run {number} has a budget for {own.relation}")
        run = RunState(number, name, _text(started), text, own, self.budget, not self.live())
        try:
            relation = run.plan.relation
        except UnregisteredScheme:
            relation = Relation(plan["relation"])  # it is kept: another process can read it
        if relation is not self.budget.relation:
            raise ValueError(f"run {number} has a plan for {relation}")
        self.runs[number] = run

    def _add_attempt(self, run: RunState, attempt: int, budget: Any) -> None:
        if _count(attempt) != len(run.attempts) + 1:
            raise ValueError(f"attempt {attempt} of run {run.id} is not the next")
        _budget(budget)
        run.attempts.append(0)

    def _add_sampling(self, run: RunState, attempt: int, fingerprint: str) -> None:
        if not 1 <= _count(attempt) <= len(run.attempts) or _text(fingerprint) in self._sampled:
            raise ValueError(f"attempt {attempt} of run {run.id} cannot draw these batches")
        self._sampled[fingerprint] = run.id, attempt

    def _add_charge(self, run: RunState, attempt: int, events: int) -> None:
        run.attempts[_count(attempt) - 1] += _count(events)
        _count(run.charged)

    def _add_return(self, run: RunState, attempt: int, events: int) -> None:
        run.attempts[_count(attempt) - 1] -= _count(events)
        if run.attempts[attempt - 1] < 0:
            raise ValueError(f"attempt {attempt} of run {run.id} returns more than it was charged")

    def _add_claim(
        self, run: RunState, claim: str, noise_multiplier: float, key: str | None = None
    ) -> None:
        if _text(claim) in run.claims:
            raise ValueError(f"{claim!r} was claimed before")
        if type(noise_multiplier) not in (int, float) or not noise_multiplier >= 0:
            raise ValueError(f"a claim has noise multiplier {noise_multiplier!r}")
        run.claims[claim] = float(noise_multiplier)
        if key is not None:
            run.keys[claim] = _text(key)

    def _name_claim(self, run: RunState, claim: str, name: str) -> None:
        if _text(name) in run.claims:
            raise ValueError(f"{name!r} was claimed before")
        run.claims[name] = run.claims.pop(claim)
        run.keys.pop(claim, None)

    def _drop(self, run: RunState) -> None:
        if run.charged or json.loads(run.plan_text)["prelude"]:
            raise ValueError(f"run {run.id} was charged and is dropped")
        run.dropped = True


_CHANGES: dict[str, Callable[..., None]] = {
    "attempt": LedgerState._add_attempt,
    "sampling": LedgerState._add_sampling,
    "charge": LedgerState._add_charge,
    "return": LedgerState._add_return,
    "claim": LedgerState._add_claim,
    "name": LedgerState._name_claim,
    "drop": LedgerState._drop,
}


def _budget(fields: Any) -> Budget:
    numbers = fields["epsilon"], fields["delta"]
    if set(fields) != {"epsilon", "delta", "relation"} or not all(
        type(number) is float for number in numbers
    ):
        raise TypeError(f"the budget is {fields!r}")
    return Budget(*numbers, Relation(fields["relation"]))


def _count(number: Any) -> int:
    if type(number) is not int or not 1 <= number <= _MOST_EVENTS:
        raise ValueError(f"{number!r} is no count")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
