"""What a run will release, fixed before it begins."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import dp_accounting as dpa

from tacit.accounting.accountant import epsilon_of_event, run_event, steps_within
from tacit.accounting.pld import FINE, Precision
from tacit.accounting.rdp import epsilon_of_curve, renyi_curve
from tacit.budget import Budget, Relation
from tacit.sampling import schemes
from tacit.sampling.schemes import Scheme, Unit


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
        self.scheme.require(self.accounted_relation)

    @property
    def accounted_relation(self) -> Relation:
        """The relation between sampled units that one record's change amounts to.

        A record added to a mini-set turns one clipped contribution into another, so to the
        accountant a mini-set has been replaced, whatever happened to the record.
        """
        return Relation.REPLACE_ONE if self.unit is Unit.MINI_SET else self.relation

    @property
    def step_event(self) -> dpa.DpEvent:
        return self.scheme.step_event(self.noise_multiplier, self.unit)

    def event(self, steps: int) -> dpa.DpEvent:
        return run_event(
            self.scheme, self.noise_multiplier, steps, unit=self.unit, prelude=self.prelude
        )

    def epsilon(self, steps: int, delta: float, precision: Precision = FINE) -> float:
        return epsilon_of_event(self.event(steps), delta, self.accounted_relation, precision)

    def epsilon_rdp(self, steps: int, delta: float) -> float:
        curve = renyi_curve(self.event(steps), self.accounted_relation)
        return epsilon_of_curve(curve, delta)

    def steps_within(self, budget: Budget) -> int:
        seen = Budget(budget.epsilon, budget.delta, self.accounted_relation)
        return steps_within(
            seen, self.noise_multiplier, self.scheme, unit=self.unit, prelude=self.prelude
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
