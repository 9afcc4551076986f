"""The ledger's file: SQLite, write-ahead log, synced to disk on every commit."""

from __future__ import annotations

import datetime
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tacit.accounting.plan import Plan
from tacit.budget import Budget, Relation

_WAIT_SECONDS = 60.0
_MAGIC = b"SQLite format 3\0"
_NO_LEDGER = "give the file of a ledger, as tacit ledger create or tacit train --ledger makes it"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS budget (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    epsilon REAL NOT NULL, delta REAL NOT NULL, relation TEXT NOT NULL,
    renyi_order REAL
);
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    started TEXT NOT NULL,
    plan TEXT NOT NULL,
    event_limit INTEGER NOT NULL,
    exclusive INTEGER NOT NULL,
    base_cost REAL NOT NULL,
    event_cost REAL NOT NULL,
    charged INTEGER NOT NULL DEFAULT 0 CHECK (charged >= 0)
);
CREATE TABLE IF NOT EXISTS claims (
    run INTEGER NOT NULL, what TEXT NOT NULL, noise_multiplier REAL NOT NULL,
    PRIMARY KEY (run, what)
);
"""


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
            self._in_memory = sqlite3.connect(":memory:", isolation_level=None)
            self._in_memory.executescript(_SCHEMA)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _require_sqlite(self.path, self.path)
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
            _refuse_if_damaged(error, self.path)
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
        db = sqlite3.connect(str(self.path), timeout=_WAIT_SECONDS, isolation_level=None)
        try:
            if create:
                _patiently(lambda: _require_own_tables(db, self.path))
                _patiently(lambda: db.executescript("PRAGMA journal_mode = WAL"))
                _patiently(lambda: db.executescript(_SCHEMA))
            # The log is synced before a commit returns: what was charged survives a power cut.
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA fullfsync = ON")
        except BaseException as error:
            db.close()
            _refuse_if_damaged(error, self.path)
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

    def add_charge(self, run_id: int, events: int) -> None:
        self._db.execute("UPDATE runs SET charged = charged + ? WHERE id = ?", (events, run_id))

    def claims(self, run_id: int) -> dict[str, float]:
        """What a run has released beside its steps, and with which noise multiplier."""
        query = "SELECT what, noise_multiplier FROM claims WHERE run = ?"
        return dict(self._db.execute(query, (run_id,)).fetchall())

    def add_claim(self, run_id: int, what: str, noise_multiplier: float) -> None:
        self._db.execute("INSERT INTO claims VALUES (?, ?, ?)", (run_id, what, noise_multiplier))

    def drop_if_nothing_was_released(self, run_id: int) -> None:
        """Forget a run that ended without a charge and had nothing before its first step."""
        run = next((r for r in self.runs() if r.id == run_id), None)
        if run is not None and run.charged == 0 and not run.plan.prelude:
            self._db.execute("DELETE FROM runs WHERE id = ?", (run_id,))

    def close(self) -> None:
        if self._in_memory is not None and os.getpid() == self._pid:
            self._in_memory.close()


@contextmanager
def copy_of(path: str | os.PathLike[str]) -> Iterator[LedgerStore]:
    """A copy of the ledger at `path`, to read from; the file itself is not even locked.

    SQLite makes files of its own beside a database that it reads. A copy is taken anew until
    nobody wrote meanwhile. Raises ValueError, and makes nothing, where there is no ledger.
    """
    source = Path(path).absolute()
    if not source.is_file():
        raise ValueError(f"there is no ledger at {path}; {_NO_LEDGER}")
    if source.stat().st_size == 0:
        raise ValueError(f"{path} is an empty file, and no ledger; {_NO_LEDGER}")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "ledger"
        _copy_quietly(source, target)
        _require_sqlite(target, source)
        with closing(sqlite3.connect(str(target), isolation_level=None)) as db:
            try:
                tables = _require_own_tables(db, source)
            except sqlite3.DatabaseError as error:
                _refuse_if_damaged(error, source)
                raise
        if "budget" not in tables or "runs" not in tables:
            raise ValueError(f"{path} is an SQLite database without a ledger in it; {_NO_LEDGER}")
        yield LedgerStore(target)


def _copy_quietly(source: Path, target: Path) -> None:
    """Copy a database and its write-ahead log as they were at one time."""
    deadline = time.monotonic() + _WAIT_SECONDS
    log, log_copy = (Path(f"{name}-wal") for name in (source, target))
    while True:
        before = _state(source), _state(log)
        shutil.copyfile(source, target)
        log_copy.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            shutil.copyfile(log, log_copy)
        if before == (_state(source), _state(log)):
            return
        if time.monotonic() > deadline:
            raise ValueError(f"{source} is written to all the time; look again later")
        time.sleep(0.01)


def _state(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _require_sqlite(file: Path, called: Path) -> None:
    """Raise unless the file is missing, empty, or begins as an SQLite database does."""
    if not file.exists():
        return
    if not file.is_file():
        raise ValueError(f"{called} is not a file, so no ledger; {_NO_LEDGER}")
    with file.open("rb") as bytes_of_it:
        start = bytes_of_it.read(len(_MAGIC))
    if start and start != _MAGIC:
        raise ValueError(f"{called} is not an SQLite database, so no ledger; {_NO_LEDGER}")


def _require_own_tables(db: sqlite3.Connection, path: Path | None) -> set[str]:
    """The tables of the database, or ValueError if it is whole and somebody else's.

    No table at all is what an interrupted start leaves.
    """
    (health,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if health != "ok":
        raise _damaged(path, health)
    found, own = _columns(db), _own_columns()
    for table, columns in found.items():
        if table not in own or not own[table] <= columns:
            raise ValueError(
                f"{path} is an SQLite database, but no ledger: its table {table!r} is not one of "
                f"a ledger's; {_NO_LEDGER}"
            )
    return set(found)


def _columns(db: sqlite3.Connection) -> dict[str, set[str]]:
    """The columns of each table, SQLite's own left out."""
    names = db.execute(
        "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') "
        "AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    ).fetchall()
    query = "SELECT name FROM pragma_table_info(?)"
    return {name: {row[0] for row in db.execute(query, (name,))} for (name,) in names}


@lru_cache(maxsize=1)
def _own_columns() -> dict[str, set[str]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(_SCHEMA)
        return _columns(db)


def _refuse_if_damaged(error: BaseException, path: Path | None) -> None:
    """Raise ValueError if SQLite says that the file is none of its own, or is broken."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    # The low byte is the kind of error.
    if code & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        raise _damaged(path, str(error)) from error


def _damaged(path: Path | None, what: str) -> ValueError:
    said = what.splitlines()[-1] if what else "no more is known"
    return ValueError(
        f"{path} is damaged or cut short ({said}), so no ledger; restore it from a copy, or "
        f"{_NO_LEDGER}"
    )


def _patiently(attempt: Callable[[], object]) -> None:
    """Some statements do not wait for a lock by themselves; try them again until they pass."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            attempt()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
