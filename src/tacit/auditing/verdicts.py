"""What an audit found: what was compared, the largest ratio, and every fault in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rich.table import Table

from tacit.canvas import table_text
from tacit.errors import AuditFailed

# Audits work in float64. A value this far above its limit is not rounding, and one below it costs
# no privacy that anybody could measure.
TOLERANCE = 1e-6


def ratio_of(value: float, limit: float) -> float:
    """value / limit; 0 of 0 is 0, and what is no number is infinitely much."""
    if math.isnan(value) or math.isnan(limit):
        return math.inf
    if value == 0:
        return 0.0
    return value / limit if limit > 0 else math.inf


@dataclass(frozen=True, repr=False)
class Verdict:
    """The result of one audit.

    `ratios` have what was reached over what is allowed, by the name of a block or a test. Above 1 a
    claim is false. `faults` say in a sentence each what is wrong. `notes` say what was not checked.
    `holds` means that this attack found nothing. It is no proof.
    """

    check: str
    compared: str
    ratios: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        beyond = [name for name, ratio in self.ratios.items() if not ratio <= 1 + TOLERANCE]
        if beyond and not self.faults:
            words = (f"{name}: {self.ratios[name]:.6g} times what is allowed" for name in beyond)
            object.__setattr__(self, "faults", tuple(words))

    @property
    def largest(self) -> float:
        """The largest ratio; 0 where nothing is measured by one."""
        return max(self.ratios.values(), default=0.0)

    @property
    def holds(self) -> bool:
        return not self.faults

    def require(self) -> Self:
        """Return the verdict if it holds, else raise `AuditFailed` with every fault."""
        if not self.holds:
            raise AuditFailed(f"{self.check}: {'; '.join(self.faults)}")
        return self

    def __repr__(self) -> str:
        state = "holds" if self.holds else "FAILED"
        lines = [f"{self.check}: {state}, largest ratio {self.largest:.4g} ({self.compared})"]
        lines += [f"  fault: {fault}" for fault in self.faults]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


@dataclass(frozen=True, repr=False)
class TrainingAudit:
    """The verdicts of all audits of one set-up; printed, they are a table."""

    verdicts: tuple[Verdict, ...]

    @property
    def holds(self) -> bool:
        return all(verdict.holds for verdict in self.verdicts)

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(f"{v.check}: {fault}" for v in self.verdicts for fault in v.faults)

    def __getitem__(self, check: str) -> Verdict:
        """The verdict of the check of that name."""
        return next(verdict for verdict in self.verdicts if verdict.check == check)

    def require(self) -> Self:
        """Return the audit if all of it holds, else raise `AuditFailed` with every fault."""
        if not self.holds:
            raise AuditFailed("; ".join(self.faults))
        return self

    def table(self) -> Table:
        """Check, what was compared, largest ratio, verdict."""
        table = Table(title="Audit of a training set-up", title_justify="left")
        for heading in ("check", "what was compared", "largest ratio", "verdict"):
            table.add_column(heading, overflow="fold")
        for v in self.verdicts:
            ratio = f"{v.largest:.4g}" if v.ratios else "-"
            table.add_row(v.check, v.compared, ratio, "holds" if v.holds else "FAILED")
        return table

    def __repr__(self) -> str:
        lines = [table_text(self.table(), 100).rstrip()]
        lines += [f"fault: {fault}" for fault in self.faults]
        lines += [f"note: {v.check}: {note}" for v in self.verdicts for note in v.notes]
        return "\n".join(lines)


def largest_of(found: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The largest ratio of each name."""
    ratios: dict[str, float] = {}
    for name, ratio in found:
        ratios[name] = max(ratio, ratios.get(name, 0.0))
    return ratios


def words_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


Factory = Any  # a callable whose keyword arguments differ from class to class
