"""The ledger's file: SQLite, write-ahead log, synced to disk on every commit."""

from __future__ import annotations

import datetime
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tacit.accounting.plan import Plan
from tacit.budget import Budget, Relation

_SCHEMA = """
CREATE TABLE IF NOT EXISTS budget (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    epsilon REAL NOT NULL, delta REAL NOT NULL, relation TEXT NOT NULL,
    renyi_order REAL
);
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    started TEXT NOT NULL,
    plan TEXT NOT NULL,
    step_limit INTEGER NOT NULL,
    exclusive INTEGER NOT NULL,
    base_cost REAL NOT NULL,
    event_cost REAL NOT NULL,
    charged INTEGER NOT NULL DEFAULT 0
);
"""


@dataclass(frozen=True)
class RunRow:
    """One run as the ledger holds it. Costs are RDP at the ledger's order, an event and before."""

    id: int
    name: str
    started: str
    plan: Plan
    step_limit: int
    exclusive: bool
    base_cost: float
    event_cost: float
    charged: int

    def cost(self, steps: int | None = None) -> float:
        """RDP at the ledger's order of the first `steps` steps (those charged, by default)."""
        count = self.plan.scheme.num_events(self.charged if steps is None else steps)
        return self.base_cost + (self.event_cost * count if count else 0.0)


class LedgerStore:
    """Reads and writes; decides nothing. All decisions are made inside `transaction`."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._connect()

    def _connect(self) -> None:
        target = ":memory:" if self.path is None else str(self.path)
        self._pid = os.getpid()
        self._db = sqlite3.connect(target, timeout=60.0, isolation_level=None)
        # The log is synced before a commit returns: a charge that returned survives a power cut.
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA fullfsync = ON")
        self._db.executescript(_SCHEMA)

    def reconnect_after_fork(self) -> bool:
        """SQLite connections do not survive a fork; open another one in the child."""
        if os.getpid() == self._pid:
            return False
        if self.path is None:
            raise RuntimeError("a ledger in memory cannot be shared with a forked process")
        self._connect()
        return True

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One writer at a time, over all processes; durable when it returns."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def budget(self) -> tuple[Budget, float | None] | None:
        row = self._db.execute(
            "SELECT epsilon, delta, relation, renyi_order FROM budget"
        ).fetchone()
        return None if row is None else (Budget(row[0], row[1], Relation(row[2])), row[3])

    def set_budget(self, budget: Budget) -> None:
        values = (budget.epsilon, budget.delta, budget.relation.value)
        self._db.execute("INSERT INTO budget VALUES (1, ?, ?, ?, NULL)", values)

    def set_order(self, order: float) -> None:
        self._db.execute("UPDATE budget SET renyi_order = ?", (order,))

    def runs(self) -> list[RunRow]:
        rows = self._db.execute(
            "SELECT id, name, started, plan, step_limit, exclusive, base_cost, event_cost, charged "
            "FROM runs ORDER BY id"
        ).fetchall()
        return [
            RunRow(r[0], r[1], r[2], Plan.from_json(r[3]), r[4], bool(r[5]), r[6], r[7], r[8])
            for r in rows
        ]

    def add_run(
        self,
        name: str | None,
        plan: Plan,
        *,
        step_limit: int,
        exclusive: bool,
        base_cost: float,
        event_cost: float,
    ) -> int:
        if name is None:
            (last,) = self._db.execute("SELECT COALESCE(MAX(id), 0) FROM runs").fetchone()
            name = f"run-{last + 1}"
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        cursor = self._db.execute(
            "INSERT INTO runs (name, started, plan, step_limit, exclusive, base_cost, event_cost) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (name, started, plan.to_json(), step_limit, exclusive, base_cost, event_cost),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def add_charge(self, run_id: int, steps: int) -> None:
        self._db.execute("UPDATE runs SET charged = charged + ? WHERE id = ?", (steps, run_id))

    def drop_if_nothing_was_released(self, run_id: int) -> None:
        """Forget a run that ended without a charge and had nothing before its first step."""
        run = next((r for r in self.runs() if r.id == run_id), None)
        if run is not None and run.charged == 0 and not run.plan.prelude:
            self._db.execute("DELETE FROM runs WHERE id = ?", (run_id,))

    def close(self) -> None:
        self._db.close()
