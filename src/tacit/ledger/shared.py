"""The ledger of several ranks: the first one keeps it, and the others wait for its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tacit.accounting.plan import Plan
from tacit.budget import Budget
from tacit.errors import PlanChanged
from tacit.ledger.charge import Ledger, RunPosition, SharedPending
from tacit.ranks import Ranks


class SharedLedger:
    """What a run asks of its `Ledger`, on every rank.

    The first rank charges, durably, and then sends the address of the noise, without which no rank
    can draw. A refusal reaches every rank as the same error. If the first rank dies before it has
    sent the address, nobody draws; if it dies afterwards, the step is charged.
    """

    def __init__(self, ranks: Ranks, make: Callable[[], Ledger]) -> None:
        self._ranks = ranks
        self._kept: Ledger | None = None
        self._attempt: tuple[int, int] | None = None
        self.identity: str = ranks.on_first(lambda: self._open(make), "the ledger")

    def _open(self, make: Callable[[], Ledger]) -> str:
        self._kept = make()
        return self._kept.identity

    def _ask(self, what: str, question: Callable[[Ledger], Any]) -> Any:
        def answer() -> Any:
            assert self._kept is not None
            return question(self._kept)

        return self._ranks.on_first(answer, what)

    def begin(
        self,
        plan: Plan,
        *,
        name: str | None = None,
        budget: Budget | None = None,
        lease_steps: int | None = None,
    ) -> None:
        def begun(ledger: Ledger) -> tuple[int, int]:
            ledger.begin(plan, name=name, budget=budget, lease_steps=lease_steps)
            return ledger.attempt()

        self._attempt = self._ask("the run", begun)

    def release(self, pending: SharedPending, into: nn.Module) -> None:
        pending.uncovered(into)  # raises if the release cannot succeed
        if pending.ranks is not self._ranks:
            raise PlanChanged(
                "this gradient is not shared by the ranks of this ledger, so that every rank would "
                "release one of its own for one charge; call sampler.share(ranks) before the "
                "mechanism is made"
            )
        self._ranks.require_same(pending.agreed(), "the step that they are about to release")
        address = self._ask("a charge", lambda ledger: ledger.charge(pending))
        pending.draw_into(into, *address)

    def attempt(self) -> tuple[int, int]:
        """The run and attempt, as they are now on the first rank and as they began on others."""
        if self._kept is not None:
            return self._kept.attempt()
        assert self._attempt is not None
        return self._attempt

    def lease_left(self) -> int:
        """Of the first rank; the others have no lease to lose."""
        return 1 if self._kept is None else self._kept.lease_left()

    def run_status(self) -> tuple[int, int]:
        status: tuple[int, int] = self._ask("the status", lambda ledger: ledger.run_status())
        return status

    def planned_events(self) -> int:
        return int(self._ask("the plan", lambda ledger: ledger.planned_events()))

    def position(self) -> RunPosition:
        position: RunPosition = self._ask("the position", lambda ledger: ledger.position())
        return position

    def charged_since(self, position: RunPosition) -> int:
        return int(self._ask("a charge since", lambda ledger: ledger.charged_since(position)))

    def end(self) -> None:
        """Return what is left of the lease. Nothing is sent: another rank may be gone."""
        if self._kept is not None:
            self._kept.end()

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
