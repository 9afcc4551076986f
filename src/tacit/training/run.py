"""A finished run: what it did, what it cost, and the table and facts that report it."""

from __future__ import annotations

import json
import resource
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import nn

from tacit.accounting.gaussian_dp import no_privacy_note
from tacit.accounting.plan import Plan
from tacit.budget import Budget
from tacit.canvas import facts_table, table_text
from tacit.errors import UnboundedLayer
from tacit.lipschitz.projection import constraints_of
from tacit.losses.registry import Task
from tacit.queries.bounded_gradient import Loss
from tacit.queries.record_overlap import are_training_records
from tacit.records import Records, as_records
from tacit.training.callbacks import Evaluation
from tacit.training.evaluation import Metrics, baseline_of, evaluate, metric_rows
from tacit.training.preconditions import TRAINING_METRICS


def peak_memory_bytes(device: torch.device) -> int:
    """The most that the allocator of a GPU has held; elsewhere, the most of the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def summary_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What a reader must know about a run, the most important first."""
    measured = metric_rows(facts)
    if facts["accuracy"] is not None:
        # What a classifier's loss and log loss are is in run.json.
        measured = [row for row in measured if "loss" not in row[0]]
    rows = [(f"{name} (held out)", value) for name, value in measured]
    rows = rows or [("metrics (held out)", "none")]
    if facts.get("baseline"):
        rows += _baseline_rows(facts["baseline"])
    if facts.get("certificate"):
        rows.append(("certified accuracy", _certified(facts["certificate"])))
    rows += [
        ("epsilon (PLD)", f"{facts['epsilon']:.4g}"),
        *_without_cap(facts),
        *_searched(facts),
        ("epsilon (RDP, cross-check)", f"{facts['epsilon_rdp']:.4g}"),
        ("delta", f"{facts['delta']:g}"),
        ("neighbouring relation", facts["relation"]),
        *_unit(facts),
        ("sampling", facts["sampling"]),
        ("noise multiplier", f"{facts['noise_multiplier']:.5g}"),
        ("steps", _steps(facts)),
        *([("seconds", f"{facts['seconds']:.1f}")] if facts["seconds"] is not None else []),
        ("peak memory", f"{facts['peak_memory_bytes'] / 2**20:,.0f} MiB"),
        ("seeded", "yes" if facts["seeded"] else "no, from the operating system"),
    ]
    rows += [("note", note) for note in facts["notes"]]
    return rows


def _without_cap(facts: dict[str, Any]) -> list[tuple[str, str]]:
    uncapped = facts.get("epsilon_without_cap")
    if uncapped is None:
        return []
    return [("epsilon without the cap on batches", f"{uncapped:.4g}")]


def _searched(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What of ε the search was, and what would be printed if it were not charged."""
    search = facts.get("search")
    if not search:
        return []
    uncharged = search["epsilon_uncharged"]
    where = "charged" if search["epsilon_of_search"] else "on records that epsilon does not cover"
    rows = [("search", f"{search['method']}, {search['trials']:g} trials, {where}")]
    if uncharged < facts["epsilon"]:
        rows.append(("epsilon, had the search not been charged", f"{uncharged:.4g}"))
    return rows


def _unit(facts: dict[str, Any]) -> list[tuple[str, str]]:
    unit = facts.get("privacy_unit", "record")
    return [] if unit == "record" else [("epsilon is for one", unit)]


def _baseline_rows(baseline: dict[str, Any]) -> list[tuple[str, str]]:
    name, value = metric_rows(baseline)[0]
    return [(f"{name} of a constant answer", f"{value} ({baseline['predictor']})")]


def _certified(certificate: dict[str, Any]) -> str:
    shares = [
        f"{row['share']:.2%} at {row['radius']:g}/255"
        for row in certificate["certified_accuracy"]
        if row["radius"] in (1, 4, 16)
    ]
    return f"{', '.join(shares)} (L2, {certificate['inputs']})"


def _steps(facts: dict[str, Any]) -> str:
    if facts["stopped"] == "plan complete":
        return str(facts["steps"])
    return f"{facts['steps']} of {facts['planned_steps']} planned (ended: {facts['stopped']})"


def summary_table(facts: dict[str, Any]) -> Table:
    return facts_table("private training run", summary_rows(facts))


def summary_text(facts: dict[str, Any], width: int = 100) -> str:
    """The facts of a run (`Run.facts`) as a table, `width` characters wide."""
    return table_text(summary_table(facts), width)


SEEDED = (
    "seeded: not private against whoever knows the seed, or sees another run that was drawn from it"
)
OVER_BUDGET = (
    "charged for more steps than this budget allows, under a larger one: epsilon counts all of them"
)
ENDED_EARLY = (
    "the run ended before its plan: epsilon is that of the whole plan, since the time to stop may "
    "have been chosen by looking at results"
)


@dataclass(repr=False)
class Run:
    """A finished run. `epsilon` is the guarantee, by PLD, for the budget's δ and relation.

    It is of `charged_steps`: the whole plan where the run might have been stopped by looking, and
    more than `steps` where an interruption lost some.
    """

    model: nn.Module
    loss: Loss
    budget: Budget
    plan: Plan
    steps: int
    epsilon: float
    epsilon_rdp: float
    seconds: float | None  # None where they would tell a secret (`tacit.search.select_best`)
    peak_memory_bytes: int
    seeded: bool
    stopped: str
    history: list[Evaluation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    charged_steps: int | None = None
    privacy_unit: str = "record"
    max_physical_batch: int | None = None
    search: dict[str, Any] | None = None  # what the search for its settings cost, if it was charged

    def __repr__(self) -> str:
        return (
            f"Run({type(self.model).__name__}, steps={self.steps} of {self.plan.steps}, "
            f"epsilon={self.epsilon:.4g} at delta={self.budget.delta:g}, stopped={self.stopped!r})"
        )

    def trained_on(self, *private: Records) -> Run:
        """Recognise these records in a report, for as long as another object keeps them.

        The run does not hold them: they must not go where it is stored, sent or made a dict.
        """
        self._records = [weakref.ref(records) for records in private]
        return self

    def known_records(self) -> list[Records]:
        """The records that it was trained on, as far as another object still keeps them."""
        return [r for r in (known() for known in getattr(self, "_records", ())) if r is not None]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_records"}

    def evaluate(self, records: Records) -> Metrics:
        """Metrics of held-out records, in pieces that training's memory had room for."""
        return evaluate(self.model, records, self.loss, self.max_physical_batch)

    def certificate(self, test: Records) -> dict[str, Any] | None:
        """Certified accuracy on `test`, in units of its inputs.

        None for an ordinary network, without records, and for a task without an accuracy.
        """
        return self._certificate(test, self.evaluate(test))

    def _certificate(self, test: Records | None, metrics: Metrics) -> dict[str, Any] | None:
        from tacit.certificates.accuracy import certified_accuracy

        if test is None or metrics.accuracy is None or not constraints_of(self.model):
            return None
        if metrics.task is Task.MULTI_LABEL:  # a radius is for one decision
            return None
        try:
            certified = certified_accuracy(self.model, test)
        except UnboundedLayer:  # trained by clipping, or by gradients clipped on the way back
            return None
        return {**certified.facts(), "inputs": "inputs as the network is given them"}

    def facts(self, test: Records | None = None, unit: float = 1.0) -> dict[str, Any]:
        """Everything about the run as plain values, ready for JSON.

        Of `test` records that were trained on, a note says that ε does not cover what they show.
        Errors of a regression are in the target's own units, if it was divided by `unit`.
        """
        test = None if test is None else as_records(test)
        metrics = self.evaluate(test).in_units(unit) if test is not None else Metrics()
        baseline = None if test is None else baseline_of(test, metrics.task)
        baseline = None if baseline is None else baseline.in_units(unit)
        warnings = [
            no_privacy_note(self.epsilon, self.budget.delta),
            self._not_covered(test),
            None if baseline is None else baseline.note(metrics),
        ]
        uncapped = self.plan.epsilon_without_cap(self.steps, self.budget.delta)
        return {
            **metrics.facts(),
            **({} if uncapped is None else {"epsilon_without_cap": uncapped}),
            "task": metrics.task,
            "baseline": None if baseline is None else baseline.facts(),
            "certificate": self._certificate(test, metrics),
            "epsilon": self.epsilon,
            "epsilon_rdp": self.epsilon_rdp,
            "delta": self.budget.delta,
            "relation": self.budget.relation.value,
            "privacy_unit": self.privacy_unit,
            "sampling": self.plan.scheme.describe(),
            "noise_multiplier": self.plan.noise_multiplier,
            "steps": self.steps,
            "planned_steps": self.plan.steps,
            "charged_steps": self.charged_steps,
            "stopped": self.stopped,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "seeded": self.seeded,
            "notes": [*filter(None, warnings), *self.notes],
            "plan": json.loads(self.plan.to_json()),
            "history": [
                {**evaluation.facts(), **evaluation.metrics.in_units(unit).facts()}
                for evaluation in self.history
            ],
            "config": self.config,
            **({} if self.search is None else {"search": self.search}),
        }

    def _not_covered(self, test: Records | None) -> str | None:
        if test is None or not any(are_training_records(test, r) for r in self.known_records()):
            return None
        return TRAINING_METRICS

    def summary(self, test: Records | None = None) -> str:
        """The table that ends a run, as text."""
        return summary_text(self.facts(test))
