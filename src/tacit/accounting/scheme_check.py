"""`check_scheme`: does a sampling scheme meet the contract of `tacit.sampling.Scheme`?"""

from __future__ import annotations

import math
from itertools import pairwise

from tacit.accounting.plan import Plan
from tacit.accounting.pld import gaussian_epsilon
from tacit.budget import Relation
from tacit.errors import UnsupportedEvent
from tacit.sampling.scheme import Scheme, Unit

_COUNTS = (*range(34), 100, 999, 12_345)
_STEPS = (1, 2, 20)
_NOISE = (0.8, 2.5)
_DELTA = 1e-5
# PLD works on a grid: two values that are equal on paper may differ by so much.
_ROUNDING = 1e-3


def check_scheme(scheme: Scheme) -> None:
    """Check what can be checked of the contract of `tacit.sampling.Scheme`.

    Storage and reading back; the counts of events and steps; epochs; that PLD and RDP accounting
    take the event for every relation that the scheme admits, with an ε that grows with the steps
    and shrinks with the noise; and that a scheme without amplification costs the Gaussian alone.
    It does not prove that the event bounds the sampling: that is the author's proof.

    Raises UnsupportedEvent with the rule that is broken.

    Example:
        >>> tacit.accounting.check_scheme(tacit.sampling.Poisson(0.1))
    """
    check_counts(scheme)
    _check_epochs(scheme)
    if not (isinstance(scheme.describe(), str) and scheme.describe().strip()):
        raise _broken(scheme, f"describe() is {scheme.describe()!r}; return a few words")
    if not isinstance(scheme.amplifies(), bool):
        raise _broken(scheme, f"amplifies() is {scheme.amplifies()!r}; return True or False")
    admitted = [
        (relation, unit)
        for relation in Relation
        for unit in Unit
        if _admits(scheme, relation, unit)
    ]
    if not admitted:
        raise _broken(scheme, "no relation and unit is admitted; require() refuses both relations")
    for relation, unit in admitted:
        plan = Plan(scheme, 1.0, relation, 10, unit)
        if Plan.from_json(plan.to_json()) != plan:
            raise _broken(scheme, "it is not equal to what is read back from storage")
        _check_epsilon(scheme, relation, unit)


def check_counts(scheme: Scheme) -> None:
    """Part 2 of the contract, which a ledger relies on: a step is at most one event."""
    events = [scheme.num_events(steps) for steps in _COUNTS]
    steps = [scheme.steps_within(count) for count in _COUNTS]
    if not all(type(count) is int for count in events + steps):
        raise _broken(scheme, "num_events and steps_within must return integers")
    if events[0] != 0 or steps[0] != 0:
        raise _broken(scheme, "num_events(0) and steps_within(0) must be 0")
    for given, count, covered in zip(_COUNTS[1:], events[1:], steps[1:], strict=True):
        if not 1 <= count <= given:
            raise _broken(
                scheme,
                f"num_events({given}) is {count}; a step is one event at the most, and one "
                "step or more is at least one event",
            )
        if scheme.steps_within(count) < given:
            raise _broken(scheme, f"steps_within(num_events({given})) is below {given}")
        if scheme.num_events(covered) > given:
            raise _broken(scheme, f"num_events(steps_within({given})) is above {given}")
    if events != sorted(events) or steps != sorted(steps):
        raise _broken(scheme, "num_events and steps_within must not decrease")


def _check_epochs(scheme: Scheme) -> None:
    passed = [scheme.epochs(steps) for steps in (0, 1, 2, 100)]
    if passed[0] != 0 or not all(math.isfinite(p) for p in passed) or passed != sorted(passed):
        raise _broken(scheme, "epochs(steps) must be 0 at 0 steps, finite, and not decrease")
    if not 0 < passed[1] <= 1:
        raise _broken(scheme, f"epochs(1) is {passed[1]}; a step is a part of an epoch, above 0")


def _admits(scheme: Scheme, relation: Relation, unit: Unit) -> bool:
    try:
        Plan(scheme, 1.0, relation, 10, unit)
    except UnsupportedEvent:
        return False
    return True


def _check_epsilon(scheme: Scheme, relation: Relation, unit: Unit) -> None:
    """ε at δ = 1e-5 by both accountants: more with more steps, less with more noise."""
    plans = [Plan(scheme, z, relation, None, unit) for z in _NOISE]
    for how in ("PLD", "RDP"):
        table = [
            [
                plan.epsilon(steps, _DELTA) if how == "PLD" else plan.epsilon_rdp(steps, _DELTA)
                for steps in _STEPS
            ]
            for plan in plans
        ]
        said = f"under {relation}, by {how}, "
        for row in table:
            if not all(math.isfinite(value) and value >= 0 for value in row):
                raise _broken(scheme, f"{said}ε is {row}; it must be finite and 0 or more")
            if any(b < a * (1 - _ROUNDING) for a, b in pairwise(row)):
                raise _broken(scheme, f"{said}ε falls with more steps: {row}")
        for column in zip(*table, strict=True):
            if any(b > a * (1 + _ROUNDING) for a, b in pairwise(column)):
                raise _broken(scheme, f"{said}ε rises with more noise: {column}")
    if not scheme.amplifies():
        _check_unamplified(scheme, plans[0], relation)


def _check_unamplified(scheme: Scheme, plan: Plan, relation: Relation) -> None:
    """Without amplification one step costs what the Gaussian costs, whoever was drawn."""
    alone = gaussian_epsilon(plan.noise_multiplier, _DELTA)
    found = plan.epsilon(1, _DELTA)
    if found < alone * (1 - _ROUNDING):
        raise _broken(
            scheme,
            f"amplifies() is False, and under {relation} a step costs ε = {found:.4g}, less than "
            f"the Gaussian alone, {alone:.4g}; return True, so that ledgers refuse repeated seeds",
        )


def _broken(scheme: object, why: str) -> UnsupportedEvent:
    return UnsupportedEvent(
        f"{type(scheme).__name__} does not meet the contract of tacit.sampling.Scheme: {why}"
    )
