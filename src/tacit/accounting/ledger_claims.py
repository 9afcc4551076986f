"""Which of the Gaussians in a plan's prelude were used, and for which value.

A plan has so many of each multiplier, and a run releases no more of them in its life. Called inside
a transaction of the ledger's.
"""

from __future__ import annotations

from collections.abc import Mapping

import dp_accounting as dpa

from tacit.accounting.ledger_store import LedgerStore
from tacit.accounting.plan import Plan
from tacit.accounting.release import Release
from tacit.errors import BudgetExceeded


def acknowledge(store: LedgerStore, run_id: int, plan: Plan) -> None:
    """The run pays for the values in its prelude, and for no others in their place.

    The same value again is free. One more than the plan has raises BudgetExceeded.
    """
    for event in plan.prelude:
        held = store.claims(run_id)
        if not isinstance(event, Release) or not event.name or event.name in held:
            continue
        require_one_more(event, event.name, plan, held)
        store.add_claim(run_id, event.name, event.noise_multiplier)


def require_one_more(
    event: dpa.GaussianDpEvent, what: str, plan: Plan, held: Mapping[str, float]
) -> None:
    """Raise BudgetExceeded if as many of this multiplier are claimed as the plan has."""
    planned = plan.prelude.count(event)
    if list(held.values()).count(float(event.noise_multiplier)) >= planned:
        number = "a release" if planned == 1 else f"{planned} releases"
        raise BudgetExceeded(_made(what, f"{number} of multiplier {event.noise_multiplier:g}"))


def require_unclaimed(
    event: dpa.GaussianDpEvent, what: str, plan: Plan, held: Mapping[str, float]
) -> None:
    """The same, and `what` itself must not have been released."""
    require_one_more(event, what, plan, held)
    if what in held:
        raise BudgetExceeded(_made(what, f"a release of multiplier {event.noise_multiplier:g}"))


def _made(what: str, paid: str) -> str:
    return (
        f"{what}: what the run was charged for, {paid}, has been made; nothing more is let out. "
        "Use what was released then, or begin another run under a name of its own"
    )
