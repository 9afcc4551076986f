"""What a run did, what it cost, and how to say so."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tacit.accounting.no_privacy import no_privacy_note
from tacit.accounting.plan import Plan
from tacit.budget import Budget
from tacit.data.records import Records
from tacit.errors import UnboundedLayer
from tacit.lipschitz.projection import constraints_of
from tacit.queries.bounded_gradient import Loss
from tacit.training.callbacks import Evaluation
from tacit.training.evaluate import Metrics, evaluate
from tacit.training.held_out import SHOWN, are_training_records

SEEDED = (
    "seeded: not private against whoever knows the seed, or sees another run that was drawn from it"
)
BEYOND = (
    "charged for more steps than this budget allows, when it had a larger one: epsilon counts all "
    "of them"
)
EARLY = (
    "ended before its plan did: epsilon is that of the whole plan, since when to stop may have "
    "been chosen by looking"
)


@dataclass
class Run:
    """A finished run. `epsilon` is the guarantee, by PLD, for the budget's δ and relation."""

    model: nn.Module
    loss: Loss
    budget: Budget
    plan: Plan
    steps: int
    epsilon: float
    epsilon_rdp: float
    seconds: float
    peak_memory_bytes: int
    seeded: bool
    stopped: str
    history: list[Evaluation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    def trained_on(self, *private: Records) -> Run:
        """Know these records again in a report, for as long as somebody else keeps them.

        They are not the run's: where it is stored, sent or turned into a dict they must not go.
        """
        self._records = [weakref.ref(records) for records in private]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_records"}

    def evaluate(self, records: Records) -> Metrics:
        return evaluate(self.model, records, self.loss)

    def certificate(self, test: Records) -> dict[str, Any] | None:
        """Certified accuracy on `test`, in units of its inputs.

        None for an ordinary network, without records, and for a task without an accuracy.
        """
        return self._certificate(test, self.evaluate(test))

    def _certificate(self, test: Records | None, metrics: Metrics) -> dict[str, Any] | None:
        from tacit.certificates import certified_accuracy

        if test is None or metrics.accuracy is None or not constraints_of(self.model):
            return None
        try:
            found = certified_accuracy(self.model, test)
        except UnboundedLayer:  # trained by clipping, or by gradients clipped on the way back
            return None
        return {**found.facts(), "inputs": "inputs as the network is given them"}

    def facts(self, test: Records | None = None) -> dict[str, Any]:
        """Everything about the run as plain values, ready for JSON.

        Of `test` records that were trained on, a note says that ε does not cover what they show.
        """
        metrics = self.evaluate(test) if test is not None else Metrics()
        warnings = [no_privacy_note(self.epsilon, self.budget.delta), self._not_covered(test)]
        return {
            **metrics.facts(),
            "certificate": self._certificate(test, metrics),
            "epsilon": self.epsilon,
            "epsilon_rdp": self.epsilon_rdp,
            "delta": self.budget.delta,
            "relation": self.budget.relation.value,
            "sampling": self.plan.scheme.describe(),
            "noise_multiplier": self.plan.noise_multiplier,
            "steps": self.steps,
            "planned_steps": self.plan.steps,
            "stopped": self.stopped,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "seeded": self.seeded,
            "notes": [*filter(None, warnings), *self.notes],
            "plan": self.plan.to_json(),
            "history": [evaluation.facts() for evaluation in self.history],
            "config": self.config,
        }

    def _not_covered(self, test: Records | None) -> str | None:
        kept = (known() for known in getattr(self, "_records", ()))
        if test is None or not any(are_training_records(test, one) for one in kept if one):
            return None
        return SHOWN

    def summary(self, test: Records | None = None) -> str:
        """The table that ends a run, as text."""
        from tacit.report.table import summary_text

        return summary_text(self.facts(test))
