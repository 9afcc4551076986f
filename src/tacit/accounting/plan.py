"""A plan is what a run will release, fixed before it begins; and what it costs.

The three directions of accounting are ε from the noise, the noise from ε, and the steps from both.
ε is by privacy loss distributions (`pld`); Rényi DP (`rdp`) is the cross-check and gives a first
bound for the search. `check_scheme` tests whether plans with a sampling scheme can be accounted.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import dp_accounting as dpa
from scipy.optimize import brentq

from tacit.accounting.composition import COARSE, FINE, Grid
from tacit.accounting.events import Release, components_of
from tacit.accounting.pld import (
    epsilon_of,
    gaussian_epsilon,
    gaussian_multiplier,
)
from tacit.accounting.rdp import copies_within, epsilon_of_curve, renyi_curve
from tacit.accounting.selection import selection_epsilon
from tacit.budget import Budget, Relation, require_delta
from tacit.errors import BudgetExceeded, UnsupportedEvent
from tacit.sampling.poisson import Poisson, TruncatedPoisson
from tacit.sampling.sampler import Sampler
from tacit.sampling.scheme import (
    Scheme,
    Unit,
    accounted_relation,
    scheme_from_fields,
    scheme_to_fields,
)

_MAX_STEPS = 10**8
_LEAST_NOISE = 1e-2


def epsilon_of_event(
    event: dpa.DpEvent, delta: float, relation: Relation, grid: Grid = FINE
) -> float:
    """The reported ε of an event whose parameters were all fixed beforehand: by PLD.

    One with a selection in it (`tacit.sampling.SelectedRun`) is by the bounds of `selection`.
    """
    require_delta(delta)
    selected = selection_epsilon(event, delta, relation, grid)
    if selected is not None:
        return selected
    unsampled = gaussian_multiplier(event)
    if unsampled is not None:
        return gaussian_epsilon(unsampled, delta)
    return epsilon_of(components_of(event), relation, delta, grid)


@dataclass(frozen=True)
class Plan:
    """Sampling, noise and number of steps; `relation` is the one the user's ε is for.

    `prelude` holds what is released before the first step, such as scaling statistics; a ledger
    stores Gaussians. PLD accounting is valid because all of this is fixed beforehand.

    Example:
        >>> Plan(Poisson(0.01), 1.1, Relation.ADD_OR_REMOVE_ONE, 1000).epsilon(1000, 1e-5)
    """

    scheme: Scheme
    noise_multiplier: float
    relation: Relation
    steps: int | None = None
    unit: Unit = Unit.RECORD
    prelude: tuple[dpa.DpEvent, ...] = ()

    def __post_init__(self) -> None:
        multiplier = self.noise_multiplier
        if not isinstance(multiplier, numbers.Real) or not multiplier >= 0:
            raise ValueError(f"noise multiplier is {multiplier!r}; give a number, 0 or more")
        # Numbers that JSON and SQLite know, not NumPy's.
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))
        prelude = tuple(
            dpa.GaussianDpEvent(float(event.noise_multiplier))
            if type(event) is dpa.GaussianDpEvent
            else event
            for event in self.prelude
        )
        object.__setattr__(self, "prelude", prelude)
        if self.steps is not None:
            if self.steps < 0:
                raise ValueError(f"steps is {self.steps}; give 0 or more")
            object.__setattr__(self, "steps", int(self.steps))
        for event in self.prelude:
            if isinstance(event, Release) and not event.serves(self.relation):
                raise ValueError(
                    f"{event.name} was released with noise for {event.relation}, and the run is "
                    f"for {self.relation}; release it with relation={self.relation.value!r}"
                )
        self.scheme.require(self.accounted_relation)
        _ = self.step_event  # refuses a unit that the scheme cannot draw

    @property
    def accounted_relation(self) -> Relation:
        return accounted_relation(self.relation, self.unit)

    @property
    def step_event(self) -> dpa.DpEvent:
        return self.scheme.step_event(self.noise_multiplier, self.unit)

    def event(self, steps: int) -> dpa.DpEvent:
        """Everything that `steps` steps release, with the prelude."""
        return self.event_of_count(self.scheme.num_events(steps))

    def event_of_count(self, count: int) -> dpa.DpEvent:
        """The same for a number of events, as a ledger counts them."""
        steps = [dpa.SelfComposedDpEvent(self.step_event, count)] if count > 0 else []
        return dpa.ComposedDpEvent([*self.prelude, *steps])

    def epsilon(self, steps: int, delta: float, grid: Grid = FINE) -> float:
        return self.epsilon_of_count(self.scheme.num_events(steps), delta, grid)

    def epsilon_of_count(self, count: int, delta: float, grid: Grid = FINE) -> float:
        event = self.event_of_count(count)
        return epsilon_of_event(event, delta, self.accounted_relation, grid)

    def epsilon_without_cap(self, steps: int, delta: float) -> float | None:
        """ε of the same run without a cap on its batches; None where there is none."""
        if not isinstance(self.scheme, TruncatedPoisson):
            return None
        return replace(self, scheme=Poisson(self.scheme.rate)).epsilon(steps, delta)

    def epsilon_rdp(self, steps: int, delta: float) -> float:
        return self.epsilon_rdp_of_count(self.scheme.num_events(steps), delta)

    def epsilon_rdp_of_count(self, count: int, delta: float) -> float:
        require_delta(delta)
        curve = renyi_curve(self.event_of_count(count), self.accounted_relation)
        return epsilon_of_curve(curve, delta)

    def steps_within(self, budget: Budget) -> int:
        """The largest number of steps whose ε is within the budget; one more would pass it."""
        if budget.relation is not self.relation:
            raise ValueError(f"the plan is for {self.relation}, the budget for {budget.relation}")

        @cache
        def spent(steps: int) -> float:
            return self.epsilon(steps, budget.delta)

        def excess(log_steps: float) -> float:
            share = spent(round(math.exp(log_steps))) / budget.epsilon
            return math.log(min(max(share, 1e-12), 1e300))

        if self.noise_multiplier == 0 or spent(1) > budget.epsilon:
            return 0
        # RDP over-estimates ε and is linear in the steps: what it allows is a first lower bound.
        before = renyi_curve(self.event_of_count(0), self.accounted_relation)
        one = renyi_curve(self.step_event, self.accounted_relation)
        events = float(copies_within(one, budget, before).max())
        by_rdp = self.scheme.steps_within(int(min(max(events, 0.0), _MAX_STEPS)))
        low, high = 1, max(1, by_rdp)
        if high >= _MAX_STEPS:
            return _MAX_STEPS
        while spent(high) <= budget.epsilon:
            if high == _MAX_STEPS:
                return high
            low, high = high, min(math.ceil(high * 1.3) + 1, _MAX_STEPS)
        # log ε is nearly linear in log steps; the root is exact to a quarter of a step.
        root = brentq(excess, math.log(low), math.log(high), xtol=0.25 / high)
        steps = round(math.exp(root))
        while spent(steps) > budget.epsilon:
            steps -= 1
        while spent(steps + 1) <= budget.epsilon:
            steps += 1
        return steps

    def to_json(self) -> str:
        """Text from which `from_json` makes an equal plan, without running stored code.

        Raises UnsupportedEvent for a plan that could not be read back: its scheme is not
        registered (`tacit.register_scheme`), or has fields that JSON does not keep.
        """
        for event in self.prelude:
            if not isinstance(event, dpa.GaussianDpEvent):
                raise UnsupportedEvent(
                    f"{event!r} cannot come before a run; give GaussianDpEvent(noise_multiplier)"
                )
        stored = {
            "scheme": scheme_to_fields(self.scheme),
            "noise_multiplier": self.noise_multiplier,
            "relation": self.relation.value,
            "steps": self.steps,
            "unit": self.unit.value,
            "prelude": [event.noise_multiplier for event in self.prelude],
        }
        try:
            text = json.dumps(stored, sort_keys=True)
            again = Plan.from_json(text)
            hash(again)
            if again != self:
                raise ValueError(f"{again.scheme} is read back for {self.scheme}")
        except (TypeError, ValueError) as error:
            raise UnsupportedEvent(
                f"a plan with {type(self.scheme).__name__} cannot be stored and read back "
                f"({error}); its fields must be numbers, strings, booleans or None, and its "
                "constructor must take them"
            ) from error
        return text

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises UnregisteredScheme where its scheme has no class in this process, and ValueError,
        TypeError or KeyError for anything that is not such a text.
        """
        stored: dict[str, Any] = json.loads(text)
        steps, noise = stored["steps"], (stored["noise_multiplier"], *stored["prelude"])
        if not (steps is None or (type(steps) is int and steps < 2**53)):
            raise TypeError(f"the number of steps is {steps!r}")
        if not all(type(z) in (int, float) and not math.isnan(z) for z in noise):
            raise TypeError(f"the noise multipliers are {noise!r}")
        return Plan(
            scheme=scheme_from_fields(stored["scheme"]),
            noise_multiplier=stored["noise_multiplier"],
            relation=Relation(stored["relation"]),
            steps=steps,
            unit=Unit(stored["unit"]),
            prelude=tuple(dpa.GaussianDpEvent(z) for z in stored["prelude"]),
        )


def epsilon(
    noise_multiplier: float,
    sampling: Scheme | Sampler,
    steps: int | None = None,
    *,
    delta: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    unit: Unit = Unit.RECORD,
    prelude: Sequence[dpa.DpEvent] = (),
) -> float:
    """ε of `steps` noisy steps at this δ, by privacy loss distributions. [Koskela 2020]

    All steps together are (ε, δ)-DP under `relation`, if the parameters were fixed before the first
    one. `sampling` is a scheme, or a sampler, whose own number of steps is the default.

    Example:
        >>> tacit.epsilon(1.0, tacit.sampling.Poisson(0.01), 1000, delta=1e-5)  # 1.83
    """
    steps, scheme = steps_of(sampling, steps), scheme_of(sampling)
    plan = Plan(scheme, noise_multiplier, relation, steps, unit, tuple(prelude))
    return plan.epsilon(steps, delta)


def epsilon_rdp(
    noise_multiplier: float,
    sampling: Scheme | Sampler,
    steps: int | None = None,
    *,
    delta: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    unit: Unit = Unit.RECORD,
    prelude: Sequence[dpa.DpEvent] = (),
) -> float:
    """The same by Rényi DP: a cross-check, always valid and usually some percent larger."""
    steps, scheme = steps_of(sampling, steps), scheme_of(sampling)
    plan = Plan(scheme, noise_multiplier, relation, steps, unit, tuple(prelude))
    return plan.epsilon_rdp(steps, delta)


def steps_within(
    budget: Budget,
    noise_multiplier: float,
    sampling: Scheme | Sampler,
    *,
    unit: Unit = Unit.RECORD,
    prelude: Sequence[dpa.DpEvent] = (),
) -> int:
    """The largest number of steps whose ε is within the budget; one more would pass it.

    Example:
        >>> budget = tacit.Budget(epsilon=3.0, delta=1e-5)
        >>> tacit.steps_within(budget, 1.0, tacit.sampling.Poisson(0.01))  # 2666
    """
    scheme = scheme_of(sampling)
    plan = Plan(scheme, noise_multiplier, budget.relation, None, unit, tuple(prelude))
    return plan.steps_within(budget)


def calibrate(
    budget: Budget,
    sampling: Scheme | Sampler,
    steps: int | None = None,
    *,
    unit: Unit = Unit.RECORD,
    prelude: Sequence[dpa.DpEvent] = (),
) -> float:
    """The least noise multiplier (to five digits, rounded up) whose ε is within the budget.

    Example:
        >>> budget = tacit.Budget(epsilon=3.0, delta=1e-5)
        >>> tacit.calibrate(budget, tacit.sampling.Poisson(0.01), 1000)  # 0.81
    """
    steps = steps_of(sampling, steps)
    plan = Plan(scheme_of(sampling), 1.0, budget.relation, steps, unit, tuple(prelude))
    if plan.epsilon_of_count(0, budget.delta) >= budget.epsilon:
        raise BudgetExceeded(
            f"what comes before the run spends all of epsilon {budget.epsilon:g} on its own; "
            "add noise to it, or raise the budget"
        )
    if plan.scheme.num_events(steps) == 0:
        return 0.0

    def excess(log_z: float, grid: Grid) -> float:
        spent = replace(plan, noise_multiplier=math.exp(log_z)).epsilon(steps, budget.delta, grid)
        return math.log(max(spent, 1e-12) / budget.epsilon)

    low, high = _bracket(lambda log_z: excess(log_z, COARSE), budget)
    if math.exp(high) <= _LEAST_NOISE:
        return _LEAST_NOISE  # a budget so large that next to no noise is asked for; keep a little
    rough = brentq(lambda log_z: excess(log_z, COARSE), low, high, xtol=1e-4)
    fine = _polish(lambda log_z: excess(log_z, FINE), rough)
    return math.exp(fine)


def _bracket(excess: Callable[[float], float], budget: Budget) -> tuple[float, float]:
    """Two values of log z, a factor two apart, between which ε passes the budget."""
    log_z, step = 0.0, math.log(2)
    if excess(log_z) > 0:
        while excess(log_z + step) > 0:
            log_z += step
            if log_z > math.log(1e6):
                raise BudgetExceeded(
                    f"no noise multiplier below 1e6 keeps this run within epsilon "
                    f"{budget.epsilon:g} at delta {budget.delta:g}; take fewer steps or more budget"
                )
        return log_z, log_z + step
    while log_z > math.log(_LEAST_NOISE) and excess(log_z - step) <= 0:
        log_z -= step
    return log_z - step, log_z


def _polish(excess: Callable[[float], float], rough: float) -> float:
    """From a root to a few 1e-4 to one to 1e-5, on the side where the budget holds.

    log ε is close to linear in log z over such a short way, so a secant needs few calls.
    """
    low, high = rough - 1e-3, rough + 1e-3
    at_low, at_high = excess(low), excess(high)
    while at_low <= 0 and low > rough - 1:
        high, at_high = low, at_low
        low -= 4e-3
        at_low = excess(low)
    while at_high > 0:
        low, at_low = high, at_high
        high += 4e-3
        at_high = excess(high)
    if at_low <= 0:
        return high
    guess = low + (high - low) * at_low / (at_low - at_high) + 2e-6
    while guess < high:
        if excess(guess) <= 0:
            return guess
        guess += 1e-5
    return high


def scheme_of(sampling: Scheme | Sampler) -> Scheme:
    return sampling.scheme if isinstance(sampling, Sampler) else sampling


def steps_of(sampling: Scheme | Sampler, steps: int | None) -> int:
    """`steps`, or those of the sampler."""
    if steps is not None:
        return steps
    if not isinstance(sampling, Sampler):
        raise ValueError("give the number of steps; a scheme has none of its own")
    return sampling.steps


_COUNTS = (*range(34), 100, 999, 12_345)
_GRID_ERROR = 1e-3  # PLD works on a grid: values that are equal on paper may differ by so much


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
    epochs = [scheme.epochs(steps) for steps in (0, 1, 2, 100)]
    if epochs[0] != 0 or not all(map(math.isfinite, epochs)) or epochs != sorted(epochs):
        raise _broken(scheme, "epochs(steps) must be 0 at 0 steps, finite, and not decrease")
    if not 0 < epochs[1] <= 1:
        rule = f"epochs(1) is {epochs[1]}; a step is a part of an epoch, above 0"
        raise _broken(scheme, rule)
    description, amplifies = scheme.describe(), scheme.amplifies()
    if not (isinstance(description, str) and description.strip()):
        raise _broken(scheme, f"describe() is {description!r}; return a few words")
    if not isinstance(amplifies, bool):
        raise _broken(scheme, f"amplifies() is {amplifies!r}; return True or False")
    admitted = []
    for relation, unit in product(Relation, Unit):
        with suppress(UnsupportedEvent):
            admitted.append(Plan(scheme, 1.0, relation, 10, unit))
    if not admitted:
        rule = "no relation and unit is admitted; require() refuses both relations"
        raise _broken(scheme, rule)
    for plan in admitted:
        plan.to_json()
        _check_epsilon(plan)


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


def _check_epsilon(admitted: Plan) -> None:
    """ε at δ = 1e-5 by both accountants: more with more steps, less with more noise."""
    scheme, relation, delta = admitted.scheme, admitted.relation, 1e-5
    plans = [replace(admitted, noise_multiplier=z) for z in (0.8, 2.5)]
    for accountant, account in (("PLD", Plan.epsilon), ("RDP", Plan.epsilon_rdp)):
        table = [[account(plan, steps, delta) for steps in (1, 2, 20)] for plan in plans]
        where = f"under {relation}, by {accountant}, "
        for row in table:
            if not all(math.isfinite(value) and value >= 0 for value in row):
                raise _broken(scheme, f"{where}ε is {row}; it must be finite and 0 or more")
            if any(b < a * (1 - _GRID_ERROR) for a, b in pairwise(row)):
                raise _broken(scheme, f"{where}ε falls with more steps: {row}")
        for less_noise, more_noise in zip(*table, strict=True):
            if more_noise > less_noise * (1 + _GRID_ERROR):
                column = (less_noise, more_noise)
                raise _broken(scheme, f"{where}ε rises with more noise: {column}")
    # Without amplification one step costs what the Gaussian costs, whoever was drawn.
    gaussian = gaussian_epsilon(plans[0].noise_multiplier, delta)
    step = plans[0].epsilon(1, delta)
    if not scheme.amplifies() and step < gaussian * (1 - _GRID_ERROR):
        raise _broken(
            scheme,
            f"amplifies() is False, and under {relation} a step costs ε = {step:.4g}, less than "
            f"the Gaussian alone, {gaussian:.4g}; return True, so that ledgers refuse repeated "
            "seeds",
        )


def _broken(scheme: Scheme, rule: str) -> UnsupportedEvent:
    return UnsupportedEvent(
        f"{type(scheme).__name__} does not meet the contract of tacit.sampling.Scheme: {rule}"
    )
