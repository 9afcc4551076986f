"""What a ledger's runs amount to, how much of it is a guarantee, and how to read it from a file."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit.accounting.plan import Plan
from tacit.accounting.rdp import epsilon_at
from tacit.budget import Budget
from tacit.ledger.policy import LedgerState, RunState
from tacit.ledger.store import WAIT_SECONDS, LedgerLog, require_sqlite
from tacit.sampling.scheme import UnregisteredScheme


@dataclass(frozen=True)
class RunCharge:
    """What one run has been charged for, by PLD at the ledger's δ.

    `epsilon` is of the steps charged so far; `epsilon_planned`, of all that the run may take, is
    what holds when it was stopped by somebody who had looked. Where this process does not know the
    run's sampling scheme, `plan` is None, `note` says which one to import, both ε are infinite,
    and steps are counted in events. `claims` names the releases of its prelude that were made.
    """

    name: str
    started: str
    steps: int
    step_limit: int | None
    epsilon: float
    epsilon_planned: float
    exclusive: bool
    plan: Plan | None
    note: str = ""
    claims: tuple[str, ...] = ()


@dataclass(frozen=True)
class Statement:
    """All runs over one dataset.

    `epsilon` is the guarantee: of one run, that of its whole plan; of several, the ledger's
    budget, which the filter keeps in every outcome. `epsilon_charged` is what the steps charged
    so far add up to: it shows how much is left, and is not itself a guarantee, because when to
    stop may have been chosen by looking. `method` says how it was added up. `head` is the digest
    of the ledger's last row: keep it, and `tacit ledger verify` finds an old copy put back.
    """

    budget: Budget
    runs: tuple[RunCharge, ...]
    epsilon: float
    epsilon_charged: float
    method: str
    head: str = ""

    def facts(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "epsilon": self.epsilon,
            "epsilon_charged": self.epsilon_charged,
            "method": self.method,
            "budget_epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "relation": self.budget.relation.value,
            "head": self.head,
            "runs": [
                {
                    "name": run.name,
                    "started": run.started,
                    "charged_steps": run.steps,
                    "step_limit": run.step_limit,
                    "epsilon": run.epsilon,
                    "epsilon_planned": run.epsilon_planned,
                    "exclusive": run.exclusive,
                    "sampling": run.plan.scheme.describe() if run.plan else run.note,
                    "noise_multiplier": run.plan.noise_multiplier if run.plan else None,
                }
                for run in self.runs
            ],
        }


def statement_of(state: LedgerState, head: str) -> Statement:
    """Every run and the total, computed from the plans."""
    budget, live = state.budget, state.live()
    runs = tuple(_charge_of(state, run) for run in live)
    if not runs:
        return Statement(budget, runs, 0.0, 0.0, "nothing was released", head)
    if len(runs) == 1:
        return Statement(budget, runs, runs[0].epsilon_planned, runs[0].epsilon, "PLD", head)
    try:
        order, _ = state.filter()
        charged = epsilon_at(order, math.fsum(run.cost(order) for run in live), budget)
        method = f"RDP filter at order {order:g}"
    except UnregisteredScheme as error:
        charged, method = math.inf, f"unknown: {error}"
    return Statement(budget, runs, budget.epsilon, charged, method, head)


def _charge_of(state: LedgerState, run: RunState) -> RunCharge:
    name, started, charged, delta = run.name, run.started, run.charged, state.budget.delta
    try:
        plan, limit, exclusive = run.plan, run.limit, state.exclusive(run)
    except UnregisteredScheme as error:
        return RunCharge(
            *(name, started, charged, None, math.inf, math.inf, False, None),
            note=str(error),
            claims=tuple(run.claims),
        )
    return RunCharge(
        name,
        started,
        steps=plan.scheme.steps_within(charged),
        step_limit=plan.scheme.steps_within(limit),
        epsilon=plan.epsilon_of_count(charged, delta),
        epsilon_planned=plan.epsilon_of_count(max(limit, charged), delta),
        exclusive=exclusive,
        plan=plan,
        claims=tuple(run.claims),
    )


def read_statement(path: str | os.PathLike[str]) -> Statement:
    """Every run of the ledger at `path` and the total, without a change to any file there.

    Raises LedgerDamaged where there is no ledger, or one that was changed.
    """
    with _opened_copy(path) as log, log.transaction() as state:
        return statement_of(state, log.head.digest)


def verify_file(
    path: str | os.PathLike[str],
    head: str | None = None,
    anchor: str | os.PathLike[str] | None = None,
) -> Statement:
    """The same, of a ledger whose chain has the row of digest `head` and that of the anchor."""
    if anchor is not None and not os.path.exists(anchor):
        raise ValueError(f"there is no anchor at {anchor}; give the file that follows the ledger")
    with _opened_copy(path, anchor) as log:
        log.verify(head)
        with log.transaction() as state:
            return statement_of(state, log.head.digest)


def read_statements(path: str | os.PathLike[str], head: str) -> tuple[Statement, Statement]:
    """What the ledger states now, and what it stated when the row of digest `head` was its last.

    Raises LedgerDamaged where it has no such row.
    """
    with _opened_copy(path) as log:
        log.verify(head)
        with log.transaction() as state:
            then = statement_of(log.state_at(head), head)
            return statement_of(state, log.head.digest), then


@contextmanager
def _opened_copy(
    path: str | os.PathLike[str], anchor: str | os.PathLike[str] | None = None
) -> Iterator[LedgerLog]:
    """A copy of the ledger at `path`, to read from; the file itself is not even locked.

    SQLite makes files of its own beside a database that it reads. The database and its write-ahead
    log are copied again until nobody wrote meanwhile. Raises LedgerDamaged, and makes nothing,
    where there is no ledger.
    """
    source = Path(os.path.realpath(path))
    require_sqlite(source, path)
    write_ahead_log = Path(f"{source}-wal")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "ledger"
        log_copy = Path(f"{copy}-wal")
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            before = _modified(source), _modified(write_ahead_log)
            shutil.copyfile(source, copy)
            log_copy.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                shutil.copyfile(write_ahead_log, log_copy)
            if before == (_modified(source), _modified(write_ahead_log)):
                break
            if time.monotonic() > deadline:
                raise ValueError(f"{path} is written to all the time; look again later")
            time.sleep(0.01)
        yield LedgerLog(copy, anchor=anchor, called=path)


def _modified(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
