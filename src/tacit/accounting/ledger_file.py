"""Is this file a ledger? Asked before it is written to; and a copy of it, to be read."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path

WAIT_SECONDS = 60.0
_MAGIC = b"SQLite format 3\0"
_NO_LEDGER = "give the file of a ledger, as tacit ledger create or tacit train --ledger makes it"
SCHEMA = """
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
CREATE TABLE IF NOT EXISTS beginnings (run INTEGER PRIMARY KEY, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS claims (
    run INTEGER NOT NULL, what TEXT NOT NULL, noise_multiplier REAL NOT NULL,
    PRIMARY KEY (run, what)
);
"""


@contextmanager
def copied(path: str | os.PathLike[str]) -> Iterator[Path]:
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
        require_sqlite(target, source)
        with closing(sqlite3.connect(str(target), isolation_level=None)) as db:
            try:
                tables = require_own_tables(db, source)
            except sqlite3.DatabaseError as error:
                refuse_if_damaged(error, source)
                raise
        if "budget" not in tables or "runs" not in tables:
            raise ValueError(f"{path} is an SQLite database without a ledger in it; {_NO_LEDGER}")
        yield target


def _copy_quietly(source: Path, target: Path) -> None:
    """Copy a database and its write-ahead log as they were at one time."""
    deadline = time.monotonic() + WAIT_SECONDS
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


def require_sqlite(file: Path, called: Path) -> None:
    """Raise unless the file is missing, empty, or begins as an SQLite database does."""
    if not file.exists():
        return
    if not file.is_file():
        raise ValueError(f"{called} is not a file, so no ledger; {_NO_LEDGER}")
    with file.open("rb") as bytes_of_it:
        start = bytes_of_it.read(len(_MAGIC))
    if start and start != _MAGIC:
        raise ValueError(f"{called} is not an SQLite database, so no ledger; {_NO_LEDGER}")


def require_own_tables(db: sqlite3.Connection, path: Path | None) -> set[str]:
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
        db.executescript(SCHEMA)
        return _columns(db)


def refuse_if_damaged(error: BaseException, path: Path | None) -> None:
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
