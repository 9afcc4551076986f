"""`check_scheme`: does a sampling scheme meet the contract of `tacit.sampling.Scheme`?"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product

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
    passed = [scheme.epochs(steps) for steps in (0, 1, 2, 100)]
    sound = passed[0] == 0 and all(map(math.isfinite, passed)) and passed == sorted(passed)
    _require(scheme, sound, "epochs(steps) must be 0 at 0 steps, finite, and not decrease")
    _require(
        scheme,
        0 < passed[1] <= 1,
        f"epochs(1) is {passed[1]}; a step is a part of an epoch, above 0",
    )
    words, amplifies = scheme.describe(), scheme.amplifies()
    said = isinstance(words, str) and bool(words.strip())
    _require(scheme, said, f"describe() is {words!r}; return a few words")
    known = isinstance(amplifies, bool)
    _require(scheme, known, f"amplifies() is {amplifies!r}; return True or False")
    admitted = []
    for relation, unit in product(Relation, Unit):
        with suppress(UnsupportedEvent):
            admitted.append(Plan(scheme, 1.0, relation, 10, unit))
    _require(
        scheme, bool(admitted), "no relation and unit is admitted; require() refuses both relations"
    )
    for plan in admitted:
        again = Plan.from_json(plan.to_json())
        _require(scheme, again == plan, "it is not equal to what is read back from storage")
        _check_epsilon(plan)


def check_counts(scheme: Scheme) -> None:
    """Part 2 of the contract, which a ledger relies on: a step is at most one event."""
    events = [scheme.num_events(steps) for steps in _COUNTS]
    steps = [scheme.steps_within(count) for count in _COUNTS]
    whole = all(type(count) is int for count in events + steps)
    _require(scheme, whole, "num_events and steps_within must return integers")
    nothing = events[0] == steps[0] == 0
    _require(scheme, nothing, "num_events(0) and steps_within(0) must be 0")
    for given, count, covered in zip(_COUNTS[1:], events[1:], steps[1:], strict=True):
        _require(
            scheme,
            1 <= count <= given,
            f"num_events({given}) is {count}; a step is one event at the most, and one "
            "step or more is at least one event",
        )
        enough = scheme.steps_within(count) >= given
        _require(scheme, enough, f"steps_within(num_events({given})) is below {given}")
        inside = scheme.num_events(covered) <= given
        _require(scheme, inside, f"num_events(steps_within({given})) is above {given}")
    ascending = events == sorted(events) and steps == sorted(steps)
    _require(scheme, ascending, "num_events and steps_within must not decrease")


def _check_epsilon(admitted: Plan) -> None:
    """ε at δ = 1e-5 by both accountants: more with more steps, less with more noise."""
    scheme, relation = admitted.scheme, admitted.relation
    plans = [replace(admitted, noise_multiplier=z) for z in _NOISE]
    for how, by in (("PLD", Plan.epsilon), ("RDP", Plan.epsilon_rdp)):
        table = [[by(plan, steps, _DELTA) for steps in _STEPS] for plan in plans]
        said = f"under {relation}, by {how}, "
        for row in table:
            proper = all(math.isfinite(value) and value >= 0 for value in row)
            _require(scheme, proper, f"{said}ε is {row}; it must be finite and 0 or more")
            rises = all(b >= a * (1 - _ROUNDING) for a, b in pairwise(row))
            _require(scheme, rises, f"{said}ε falls with more steps: {row}")
        for column in zip(*table, strict=True):
            falls = all(b <= a * (1 + _ROUNDING) for a, b in pairwise(column))
            _require(scheme, falls, f"{said}ε rises with more noise: {column}")
    # Without amplification one step costs what the Gaussian costs, whoever was drawn.
    alone, found = gaussian_epsilon(_NOISE[0], _DELTA), plans[0].epsilon(1, _DELTA)
    _require(
        scheme,
        scheme.amplifies() or found >= alone * (1 - _ROUNDING),
        f"amplifies() is False, and under {relation} a step costs ε = {found:.4g}, less than "
        f"the Gaussian alone, {alone:.4g}; return True, so that ledgers refuse repeated seeds",
    )


def _require(scheme: Scheme, holds: bool, rule: str) -> None:
    if not holds:
        raise UnsupportedEvent(
            f"{type(scheme).__name__} does not meet the contract of tacit.sampling.Scheme: {rule}"
        )
