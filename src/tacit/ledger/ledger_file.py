"""The ledger's files on disk: made at once, checked before they are used, copied, anchored.

The ledger's files on disk: made at once, checked before they are used, copied, anchored.

Errors say what to do about them. What the tables hold is in `ledger_log`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tacit.errors import LedgerDamaged

WAIT_SECONDS = 60.0
_MAGIC = b"SQLite format 3\0"
TABLES = {
    "log": "CREATE TABLE log (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, "
    "body TEXT NOT NULL, digest TEXT NOT NULL)",
    "head": "CREATE TABLE head (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), "
    "seq INTEGER NOT NULL, digest TEXT NOT NULL)",
}
GIVE_LEDGER = "give the file of a ledger, as tacit ledger create or tacit train --ledger makes it"
RESTORE = (
    "restore the newest backup of the file; without one, count the whole budget as spent on these "
    "records"
)
# Trouble with the disk or with other processes: the file itself may be whole.
NOT_DAMAGE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
}


def create(file: Path, write: Callable[[sqlite3.Connection], None]) -> None:
    """Make the file whole under another name, then give it its own, unless somebody was faster.

    A crash leaves no file, or a whole one, and a hard link never replaces a file that is there.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.new")
    try:
        with closing(sqlite3.connect(str(draft), isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA fullfsync = ON")
            db.execute("PRAGMA journal_mode = WAL")
            write(db)
        assert not os.path.exists(f"{draft}-wal"), "closing writes the log into the file"
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        try:
            os.link(draft, file)
        except FileExistsError:
            return
        except OSError as error:
            raise ValueError(
                f"a ledger cannot be made at {file} ({error}); its folder must allow hard links: "
                "give a file on a local disk"
            ) from error
        sync_folder(file.parent)
    finally:
        draft.unlink(missing_ok=True)


def require_sqlite(file: Path, called: object) -> None:
    """Raise LedgerDamaged unless the file begins as an SQLite database does."""
    if not file.exists():
        raise LedgerDamaged(f"there is no ledger at {called}; {GIVE_LEDGER}")
    if not file.is_file():
        raise LedgerDamaged(f"{called} is not a file, so no ledger; {GIVE_LEDGER}")
    with file.open("rb") as opened:
        start = opened.read(20)
    if not start:
        raise LedgerDamaged(
            f"{called} is an empty file, and no ledger; if a ledger was here, restore its backup, "
            "else delete the file, and a new ledger can be made"
        )
    if start[: len(_MAGIC)] != _MAGIC:
        raise LedgerDamaged(f"{called} is not an SQLite database, so no ledger; {GIVE_LEDGER}")
    # The versions of the format: from others SQLite reads only, or reads nothing.
    if start[18:20] not in (b"\1\1", b"\2\2"):
        raise damaged(called, "an unknown version of the file format")


def require_tables(db: sqlite3.Connection, called: object) -> None:
    """The two tables as they were made; no other table, no trigger, no view."""
    found = {
        row[0]: row[1]
        for row in db.execute("SELECT CAST(name AS BLOB), CAST(sql AS BLOB) FROM sqlite_master")
    }
    if found == {name.encode(): sql.encode() for name, sql in TABLES.items()}:
        return
    names = {str(name or b"", "utf-8", "replace") for name in found}
    if {"budget", "runs"} <= names:
        raise LedgerDamaged(
            f"{called} is a ledger of format 1, made by Tacit 0.1, whose stored limits cannot be "
            "checked; see with Tacit 0.1 what is charged (tacit ledger show), and start a new "
            "ledger with the epsilon and delta that are left"
        )
    strange = sorted(names - set(TABLES))
    what = "its tables are not those of a ledger"
    if strange:
        what = f"its table {strange[0]!r} is not one of a ledger's"
    raise LedgerDamaged(f"{called} is an SQLite database, but no ledger: {what}; {GIVE_LEDGER}")


def damaged(called: object, what: str) -> LedgerDamaged:
    said = what.splitlines()[-1] if what else "no more is known"
    return LedgerDamaged(f"{called} is damaged or cut short ({said}), so no ledger; {RESTORE}")


@contextmanager
def copied(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A copy of the ledger at `path`, to read from; the file itself is not even locked.

    SQLite makes files of its own beside a database that it reads. The copy is taken again until
    nobody wrote meanwhile. Raises LedgerDamaged, and makes nothing, where there is no ledger.
    """
    source = Path(os.path.realpath(path))
    require_sqlite(source, path)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "ledger"
        deadline = time.monotonic() + WAIT_SECONDS
        while not _copy(source, target):
            if time.monotonic() > deadline:
                raise ValueError(f"{path} is written to all the time; look again later")
            time.sleep(0.01)
        yield target


def _copy(source: Path, target: Path) -> bool:
    """Copy a database and its write-ahead log; False if somebody wrote to one of them meanwhile."""
    log, log_copy = (Path(f"{name}-wal") for name in (source, target))
    before = _modified(source), _modified(log)
    shutil.copyfile(source, target)
    log_copy.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        shutil.copyfile(log, log_copy)
    return before == (_modified(source), _modified(log))


def _modified(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class Head:
    """The last row of a ledger's log: its number and its digest."""

    seq: int
    digest: str


def read_anchor(file: Path) -> tuple[str, Head]:
    """The identity of the ledger, and the head that it had."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        identity, head = stored["ledger"], Head(stored["seq"], stored["digest"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _no_anchor(file) from error
    texts = isinstance(identity, str) and isinstance(head.digest, str)
    if not texts or type(head.seq) is not int or not 1 <= head.seq < 2**63:
        raise _no_anchor(file)
    return identity, head


def _no_anchor(file: Path) -> LedgerDamaged:
    return LedgerDamaged(
        f"{file} is not the anchor of a ledger, or was changed; check the ledger by other means, "
        "delete the file, and write it anew: tacit ledger anchor LEDGER ANCHOR"
    )


def write_anchor(file: Path, identity: str, head: Head) -> None:
    """Replace the anchor in one step, durably: a crash leaves the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.new")
    try:
        with draft.open("w", encoding="utf-8") as opened:
            json.dump({"ledger": identity, "seq": head.seq, "digest": head.digest}, opened)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make a new name in the folder survive a power cut, where the system can."""
    if os.name == "nt":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
