"""The ledger's file: SQLite, write-ahead log, synced to disk on every commit."""

from __future__ import annotations

import datetime
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tacit.accounting.ledger_file import (
    SCHEMA,
    WAIT_SECONDS,
    refuse_if_damaged,
    require_own_tables,
    require_sqlite,
)
from tacit.accounting.plan import Plan
from tacit.budget import Budget, Relation


@dataclass(frozen=True)
class RunRow:
    """One run as the ledger holds it. `charged` counts events, which are steps for all schemes but
    shuffled epochs. Costs are RDP at the ledger's order, of one event and of what came before."""

    id: int
    name: str
    started: str
    plan: Plan
    event_limit: int
    exclusive: bool
    base_cost: float
    event_cost: float
    charged: int = 0

    def cost(self, events: int | None = None) -> float:
        """RDP at the ledger's order of so many events (those charged, by default)."""
        count = self.charged if events is None else events
        return self.base_cost + (self.event_cost * count if count else 0.0)


class LedgerStore:
    """Reads and writes; decides nothing. All decisions are made inside `transaction`.

    A connection lasts for one transaction. SQLite keeps the state of its locks in the process's
    memory, and a fork that inherited an open connection could lose charges.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path).absolute()
        self._pid = os.getpid()
        self._open: sqlite3.Connection | None = None
        self._in_memory: sqlite3.Connection | None = None
        if self.path is None:
            self._in_memory = sqlite3.connect(
                ":memory:", isolation_level=None, check_same_thread=False
            )
            self._in_memory.executescript(SCHEMA)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        require_sqlite(self.path, self.path)
        with self.transaction(create=True):
            pass

    @contextmanager
    def transaction(self, create: bool = False) -> Iterator[None]:
        """One writer at a time, over all processes; durable when it returns."""
        db = self._connect(create)
        self._open = db
        try:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
        except sqlite3.DatabaseError as error:
            refuse_if_damaged(error, self.path)
            raise
        finally:
            self._open = None
            if self._in_memory is None:
                db.close()

    def _connect(self, create: bool) -> sqlite3.Connection:
        if self._in_memory is not None:
            if os.getpid() != self._pid:
                raise RuntimeError(
                    "a ledger in memory was carried into a forked process, where it would be "
                    "spent twice; give the ledger a file"
                )
            return self._in_memory
        assert self.path is not None
        db = sqlite3.connect(str(self.path), timeout=WAIT_SECONDS, isolation_level=None)
        try:
            if create:
                _patiently(lambda: require_own_tables(db, self.path))
                _patiently(lambda: db.executescript("PRAGMA journal_mode = WAL"))
                _patiently(lambda: db.executescript(SCHEMA))
            # The log is synced before a commit returns: what was charged survives a power cut.
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA fullfsync = ON")
        except BaseException as error:
            db.close()
            refuse_if_damaged(error, self.path)
            raise
        return db

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._open is not None, "only inside a transaction"
        return self._open

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
            "SELECT id, name, started, plan, event_limit, exclusive, base_cost, event_cost, "
            "charged FROM runs ORDER BY id"
        ).fetchall()
        return [
            RunRow(r[0], r[1], r[2], Plan.from_json(r[3]), r[4], bool(r[5]), r[6], r[7], r[8])
            for r in rows
        ]

    def add_run(self, name: str | None, row: RunRow) -> int:
        if name is None:
            (last,) = self._db.execute("SELECT COALESCE(MAX(id), 0) FROM runs").fetchone()
            name = f"run-{last + 1}"
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        costs = (row.event_limit, row.exclusive, row.base_cost, row.event_cost)
        cursor = self._db.execute(
            "INSERT INTO runs (name, started, plan, event_limit, exclusive, base_cost, event_cost) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (name, started, row.plan.to_json(), *costs),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def add_beginning(self, run_id: int) -> int:
        """How often the run of this id has begun, this time included; ids are never used again."""
        (count,) = self._db.execute(
            "INSERT INTO beginnings VALUES (?, 1) "
            "ON CONFLICT (run) DO UPDATE SET count = count + 1 RETURNING count",
            (run_id,),
        ).fetchone()
        return int(count)

    def add_charge(self, run_id: int, events: int) -> None:
        self._db.execute("UPDATE runs SET charged = charged + ? WHERE id = ?", (events, run_id))

    def claims(self, run_id: int) -> dict[str, float]:
        """What a run has released beside its steps, and with which noise multiplier."""
        query = "SELECT what, noise_multiplier FROM claims WHERE run = ?"
        return dict(self._db.execute(query, (run_id,)).fetchall())

    def add_claim(self, run_id: int, what: str, noise_multiplier: float) -> None:
        # As a float: SQLite would keep a number of NumPy's as bytes, which equal no number.
        self._db.execute(
            "INSERT INTO claims VALUES (?, ?, ?)", (run_id, what, float(noise_multiplier))
        )

    def rename_claim(self, run_id: int, what: str, name: str) -> None:
        query = "UPDATE claims SET what = ? WHERE run = ? AND what = ?"
        self._db.execute(query, (name, run_id, what))

    def drop_if_nothing_was_released(self, run_id: int) -> None:
        """Forget a run that ended without a charge and had nothing before its first step."""
        run = next((r for r in self.runs() if r.id == run_id), None)
        if run is not None and run.charged == 0 and not run.plan.prelude:
            self._db.execute("DELETE FROM runs WHERE id = ?", (run_id,))

    def close(self) -> None:
        if self._in_memory is not None and os.getpid() == self._pid:
            self._in_memory.close()


def _patiently(attempt: Callable[[], object]) -> None:
    """Some statements do not wait for a lock by themselves; try them again until they pass."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            attempt()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
