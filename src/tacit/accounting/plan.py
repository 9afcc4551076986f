"""What a run will release, fixed before it begins."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import dp_accounting as dpa

from tacit.accounting.accountant import (
    composed_event,
    epsilon_of_event,
    run_event,
    steps_within,
)
from tacit.accounting.pld import FINE, Precision
from tacit.accounting.rdp import epsilon_of_curve, renyi_curve
from tacit.accounting.release import Release
from tacit.budget import Budget, Relation
from tacit.errors import UnsupportedEvent
from tacit.sampling import schemes
from tacit.sampling.schemes import Scheme, Unit, accounted_relation


@dataclass(frozen=True)
class Plan:
    """Sampling, noise, and how many steps; `relation` is the one the user's ε is for.

    `prelude` holds Gaussian releases made before the first step, such as scaling statistics.
    PLD accounting is valid because all of this is fixed before anything is released.
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
        return run_event(
            self.scheme, self.noise_multiplier, steps, unit=self.unit, prelude=self.prelude
        )

    def event_of_count(self, count: int) -> dpa.DpEvent:
        """The same for a number of events, as a ledger counts them."""
        return composed_event(
            self.scheme, self.noise_multiplier, count, unit=self.unit, prelude=self.prelude
        )

    def epsilon_of_count(self, count: int, delta: float, precision: Precision = FINE) -> float:
        event = self.event_of_count(count)
        return epsilon_of_event(event, delta, self.accounted_relation, precision)

    def epsilon(self, steps: int, delta: float, precision: Precision = FINE) -> float:
        return epsilon_of_event(self.event(steps), delta, self.accounted_relation, precision)

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
        """As text, so that a ledger can recompute what it holds without running any code."""
        return json.dumps(
            {
                "scheme": {"kind": type(self.scheme).__name__, **asdict(self.scheme)},  # type: ignore[call-overload]
                "noise_multiplier": self.noise_multiplier,
                "relation": self.relation.value,
                "steps": self.steps,
                "unit": self.unit.value,
                "prelude": [event.noise_multiplier for event in self.prelude],
            },
            sort_keys=True,
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        fields: dict[str, Any] = json.loads(text)
        scheme = fields["scheme"]
        kinds = (
            schemes.Poisson,
            schemes.WithoutReplacement,
            schemes.MiniSets,
            schemes.ShuffledEpochs,
        )
        kind = {k.__name__: k for k in kinds}[scheme.pop("kind")]
        return Plan(
            scheme=kind(**scheme),
            noise_multiplier=fields["noise_multiplier"],
            relation=Relation(fields["relation"]),
            steps=fields["steps"],
            unit=Unit(fields["unit"]),
            prelude=tuple(dpa.GaussianDpEvent(z) for z in fields["prelude"]),
        )


def _with_float(event: dpa.GaussianDpEvent) -> dpa.GaussianDpEvent:
    """The same with a number that JSON and SQLite know: not one of NumPy's."""
    if isinstance(event, Release):
        return event
    return dpa.GaussianDpEvent(float(event.noise_multiplier))
