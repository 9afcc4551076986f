"""A plan: what a run will release, fixed before it begins."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import dp_accounting as dpa

from tacit.accounting.accountant import composed, epsilon_of_event, steps_within
from tacit.accounting.events import Release
from tacit.accounting.pld import FINE, Grid
from tacit.accounting.rdp import epsilon_of_curve, renyi_curve
from tacit.budget import Budget, Relation
from tacit.errors import UnsupportedEvent
from tacit.sampling.scheme import (
    Scheme,
    Unit,
    accounted_relation,
    scheme_from_fields,
    scheme_to_fields,
)


@dataclass(frozen=True)
class Plan:
    """Sampling, noise and number of steps; `relation` is the one the user's ε is for.

    `prelude` holds Gaussian releases made before the first step, such as scaling statistics.
    PLD accounting is valid because all of this is fixed before anything is released.

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
        if not self.noise_multiplier >= 0:
            raise ValueError(f"noise multiplier is {self.noise_multiplier}; give 0 or more")
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))
        object.__setattr__(self, "prelude", tuple(self.prelude))
        if self.steps is not None:
            if self.steps < 0:
                raise ValueError(f"steps is {self.steps}; give 0 or more")
            object.__setattr__(self, "steps", int(self.steps))
        for event in self.prelude:
            if not isinstance(event, dpa.GaussianDpEvent):
                raise UnsupportedEvent(
                    f"{event!r} cannot come before a run; give GaussianDpEvent(noise_multiplier)"
                )
            if not event.noise_multiplier >= 0:
                raise ValueError(f"{event!r} comes before the run; give a multiplier of 0 or more")
            if isinstance(event, Release) and not event.serves(self.relation):
                raise ValueError(
                    f"{event.name} was released with noise for {event.relation}, and the run is "
                    f"for {self.relation}; release it with relation={self.relation.value!r}"
                )
        object.__setattr__(self, "prelude", tuple(map(_with_float, self.prelude)))
        self.scheme.require(self.accounted_relation)
        self.scheme.step_event(self.noise_multiplier, self.unit)  # refuses a unit it cannot draw

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
        return composed(self.prelude, self.step_event, count)

    def epsilon(self, steps: int, delta: float, grid: Grid = FINE) -> float:
        return self.epsilon_of_count(self.scheme.num_events(steps), delta, grid)

    def epsilon_of_count(self, count: int, delta: float, grid: Grid = FINE) -> float:
        event = self.event_of_count(count)
        return epsilon_of_event(event, delta, self.accounted_relation, grid)

    def epsilon_rdp(self, steps: int, delta: float) -> float:
        return self.epsilon_rdp_of_count(self.scheme.num_events(steps), delta)

    def epsilon_rdp_of_count(self, count: int, delta: float) -> float:
        curve = renyi_curve(self.event_of_count(count), self.accounted_relation)
        return epsilon_of_curve(curve, delta)

    def steps_within(self, budget: Budget) -> int:
        return steps_within(
            budget, self.noise_multiplier, self.scheme, unit=self.unit, prelude=self.prelude
        )

    def to_json(self) -> str:
        """Text from which `from_json` makes an equal plan, without running stored code.

        Raises UnsupportedEvent for a plan that could not be read back: its scheme is not
        registered (`tacit.register_scheme`), or has fields that JSON does not keep.
        """
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
        except (TypeError, ValueError) as error:
            raise self._unreadable(str(error)) from error
        if again != self:
            raise self._unreadable(f"{again.scheme} is read back for {self.scheme}")
        return text

    def _unreadable(self, why: str) -> UnsupportedEvent:
        return UnsupportedEvent(
            f"a plan with {type(self.scheme).__name__} cannot be stored and read back ({why}); its "
            "fields must be numbers, strings, booleans or None, and its constructor must take them"
        )

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


def _with_float(event: dpa.GaussianDpEvent) -> dpa.GaussianDpEvent:
    """The same with a number that JSON and SQLite know: not one of NumPy's."""
    if isinstance(event, Release):
        return event
    return dpa.GaussianDpEvent(float(event.noise_multiplier))
