"""What an audit found."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tacit.errors import UnboundedLayer

# Everything is float64, so what passes a bound by more than this is not rounding.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Finding:
    """One claimed bound, and the largest value that the attack reached. It comes from below."""

    what: str
    claimed: float
    found: float

    @property
    def tightness(self) -> float:
        """found/claimed: near 1 the bound wastes no noise; far below 1 it may, or it resisted."""
        if self.claimed == self.found:
            return 1.0
        return self.found / self.claimed if self.claimed else math.inf

    @property
    def holds(self) -> bool:
        # Not `found > claimed`, which is False for a NaN.
        return self.found <= self.claimed * (1 + TOLERANCE) + 1e-12


@dataclass(frozen=True)
class AuditReport:
    """Every claim of a layer or a model against what was found, and the violations in words.

    `passed` means that this attack found nothing. A proof is what a docstring has.
    """

    subject: str
    findings: tuple[Finding, ...]
    faults: tuple[str, ...] = ()

    @property
    def violations(self) -> tuple[str, ...]:
        broken = (f for f in self.findings if not f.holds)
        return self.faults + tuple(
            f"{f.what}: claimed at most {f.claimed:.6g}, found {f.found:.6g} "
            f"({f.tightness:.3g} times as much)"
            for f in broken
        )

    @property
    def passed(self) -> bool:
        return not self.violations

    def tightness(self, what: str) -> float:
        """Of the claim of that name."""
        return next(f.tightness for f in self.findings if f.what == what)

    def require(self) -> AuditReport:
        """Itself if it passed; otherwise raises `UnboundedLayer` with every violation."""
        if not self.passed:
            raise UnboundedLayer(
                f"{self.subject} breaks its own bounds, so no noise calibrated to them is enough: "
                + "; ".join(self.violations)
            )
        return self

    def __str__(self) -> str:
        lines = [f"{self.subject}: {'passed' if self.passed else 'FAILED'}"]
        lines += [
            f"  {f.what:<32} claimed {f.claimed:<12.6g} found {f.found:<12.6g} {f.tightness:.3f}"
            for f in self.findings
        ]
        return "\n".join(lines + [f"  violation: {v}" for v in self.violations])
