"""Does a printed ε cover the search that the settings came from?"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.accounting.plan import Plan
from tacit.errors import UnsupportedEvent
from tacit.ledger.statement import RunCharge, read_statement
from tacit.sampling.repeated_runs import SelectedRun

if TYPE_CHECKING:
    import optuna

_ROUNDING = 1e-6


@dataclass(frozen=True)
class SearchAudit:
    """What a ledger says of a study.

    `trials` were run by the study, and `charged_trials` of them have a charge on the ledger: a
    claim that the trial names, or a run of their own.
    `epsilon_printed` is the figure in question, and `epsilon_charged` what the ledger guarantees
    for what it holds. `epsilon_owed` is what everything costs if each trial without a charge was a
    run like the largest one on the ledger. `findings` are sentences; where all is well, there are
    none.
    """

    trials: int
    charged_trials: int
    epsilon_printed: float
    epsilon_charged: float
    epsilon_owed: float
    findings: tuple[str, ...]

    @property
    def is_charged(self) -> bool:
        return not self.findings

    def require(self) -> None:
        """Raise ValueError with the findings, if there are any."""
        if self.findings:
            raise ValueError("; ".join(self.findings))


def audit_search(
    run: str | os.PathLike[str] | float,
    study: optuna.Study,
    ledger: str | os.PathLike[str] | None = None,
) -> SearchAudit:
    """Compare the printed ε of a run, the study that its settings came from, and the ledger.

    `run` is the run's folder, or the ε that was printed. `ledger` is by default the one in the
    folder. It finds a study with more trials than the ledger has charges, a printed ε below the
    ledger's, and a study beside a selection, whose other runs must not be known. It believes that
    the study is whole, and that trials were run on the ledger's records; a search on public records
    needs no charge, and is found here as if it did.

        tacit.search.audit_search("runs/x", study).require()
    """
    if isinstance(run, int | float):
        printed = float(run)
        if ledger is None:
            raise ValueError("give the ledger beside a printed epsilon, or the folder of the run")
    else:
        from tacit.report.read_folder import read_facts

        printed = float(read_facts(Path(run))["epsilon"])
        ledger = Path(run) / "ledger.sqlite" if ledger is None else ledger
    statement = read_statement(ledger)
    ran = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name != "WAITING"]
    claims = {claim for charge in statement.runs for claim in charge.claims}
    by_claim = len(claims & {trial.user_attrs.get("claim") for trial in ran})
    by_run = max(0, len(statement.runs) - 1)
    charged = min(len(ran), by_claim + by_run)
    owed = _owed(statement.runs, len(ran) - charged, statement.epsilon, statement.budget.delta)
    findings = []
    if charged < len(ran):
        findings.append(
            f"the study has {len(ran)} trials and the ledger charges {charged} of them: the "
            f"printed epsilon {printed:.4g} leaves {len(ran) - charged} out; with them it is "
            f"{owed:.4g}, if each was a run like the one on the ledger"
        )
    if printed < statement.epsilon * (1 - _ROUNDING):
        findings.append(
            f"the printed epsilon {printed:.4g} is less than what the ledger has charged, "
            f"{statement.epsilon:.4g}"
        )
    if ran and any(c.plan and isinstance(c.plan.scheme, SelectedRun) for c in statement.runs):
        findings.append(
            "the ledger charges for the best of a secret number of runs, and the study shows other "
            "trials"
        )
    return SearchAudit(len(ran), charged, printed, statement.epsilon, owed, tuple(findings))


def _owed(runs: tuple[RunCharge, ...], uncharged: int, stated: float, delta: float) -> float:
    """ε of the largest run, `uncharged` more times than it is on the ledger."""
    largest: Any = max(runs, key=lambda charge: charge.epsilon_planned, default=None)
    if uncharged == 0 or largest is None:
        return stated
    plan: Plan | None = largest.plan
    if plan is None or largest.step_limit is None:
        return math.inf
    try:
        return max(stated, plan.epsilon((uncharged + 1) * largest.step_limit, delta))
    except UnsupportedEvent:
        return math.inf
