"""The ledger's file: an append-only log whose rows form a hash chain.

Format 2. An SQLite database in WAL mode, synced on every commit, with two tables and nothing else:

    log(seq, kind, body, digest)     rows 1, 2, 3, …; `body` is a JSON object
    head(only_row, seq, digest)      one row: the last row of the log

    digest_n = SHA-256 of the JSON array [digest_{n−1}, n, kind_n, body_n],   digest_0 = "tacit 2"

`policy` says what the rows mean: all state comes from replaying them. The digest of row 1, the
budget, is the ledger's *identity*. The digest of the last row is its *head*.

LedgerDamaged is raised for

- a row that was edited, deleted (also the last one), inserted or moved, when the file is opened;
- a file that is put back, cut or forked while a process runs: every transaction checks that the
  file continues what this process has seen;
- an old copy that is put back before a process opens it, or a chain that is computed anew, if a
  head was kept elsewhere: the printed one (`tacit ledger verify FILE --head …`), or an *anchor*, a
  small file with the latest head. The anchor is replaced after each commit, so a crash may leave it
  behind the ledger; a ledger behind its anchor, or without the anchored row, is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit.budget import Budget
from tacit.errors import LedgerDamaged
from tacit.ledger.policy import FORMAT, LedgerState, budget_fields
from tacit.randomness import current_process

WAIT_SECONDS = 60.0
_MAGIC = b"SQLite format 3\0"
_TABLES = {
    "log": "CREATE TABLE log (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, "
    "body TEXT NOT NULL, digest TEXT NOT NULL)",
    "head": "CREATE TABLE head (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), "
    "seq INTEGER NOT NULL, digest TEXT NOT NULL)",
}
_GIVE_LEDGER = "give the file of a ledger, as tacit ledger create or tacit train --ledger makes it"
RESTORE = (
    "restore the newest backup of the file; without one, count the whole budget as spent on these "
    "records"
)
# Trouble with the disk or with other processes: the file itself may be whole.
_NOT_DAMAGE = {
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


@dataclass(frozen=True)
class Head:
    """The last row of a ledger's log: its number and its digest."""

    seq: int
    digest: str


START = Head(0, f"tacit {FORMAT}")


class LedgerLog:
    """Appends rows and replays them into a `LedgerState`; its callers decide, in a `transaction`.

    Args:
        path: The file; None keeps the log in memory.
        budget: The first row of a new file. None opens a file that exists.
        anchor: A file that follows the head.
        called: The path that errors name, where the file is a copy.

    A connection lasts for one transaction: SQLite keeps the state of its locks in the process's
    memory, and a fork that inherited an open connection could lose charges.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        budget: Budget | None = None,
        *,
        anchor: str | os.PathLike[str] | None = None,
        called: str | os.PathLike[str] | None = None,
    ) -> None:
        self.path = None if path is None else Path(path).absolute()
        self.anchor = None if anchor is None else Path(anchor).absolute()
        self._called = called or self.path or "the ledger in memory"
        self.head = START  # the last row that is known to be on disk
        self._forget()
        self.identity = ""
        self._process = current_process()
        self._open: sqlite3.Connection | None = None
        self._in_memory: sqlite3.Connection | None = None
        if self.path is None:
            assert budget is not None
            self._in_memory = sqlite3.connect(
                ":memory:", isolation_level=None, check_same_thread=False
            )
            _write_tables(self._in_memory, budget)
        else:
            file = Path(os.path.realpath(self.path))
            if budget is not None and not file.exists():
                self._require_no_remains(file)
                _create(file, lambda db: _write_tables(db, budget))
            require_sqlite(file, self._called)
            self._check_pages()
        with self.transaction() as state:
            self.budget = state.budget
            if self.anchor is not None and not self.anchor.exists() and self._tip.seq > 1:
                raise LedgerDamaged(
                    f"there is no anchor at {self.anchor}, and {self._called} has been used; if "
                    "this is its newest copy, make one: tacit ledger anchor LEDGER ANCHOR"
                )
        if self.anchor is not None and not self.anchor.exists():
            self.write_anchor(self.anchor)

    def _forget(self) -> None:
        self._state = LedgerState()
        self._tip = START  # the last row that `_state` holds: none, or the head

    @contextmanager
    def transaction(self) -> Iterator[LedgerState]:
        """One writer at a time, over all processes; what was appended is durable on return."""
        try:
            with self._connection() as db:
                self._open = db
                try:
                    db.execute("BEGIN IMMEDIATE")
                    try:
                        state = self._catch_up(db)
                    except (TypeError, ArithmeticError) as error:  # of a cell that was changed
                        raise _damaged(self._called, str(error)) from error
                    before = self._tip
                    yield state
                    if self._tip != before:
                        values = (self._tip.seq, self._tip.digest)
                        db.execute("UPDATE head SET seq = ?, digest = ?", values)
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                    raise
                self.head = self._tip
                if self.anchor is not None and self._tip != before:
                    self._follow(db, self.anchor)
        except BaseException as error:
            self._forget()  # the state may hold rows that were not committed
            self._refuse_if_damaged(error)
            raise
        finally:
            self._open = None

    def append(self, kind: str, **body: Any) -> None:
        """Add a row. It is replayed as it will be read: what is unreadable is not committed."""
        assert self._open is not None, "only inside a transaction"
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        self._state.apply(kind, json.loads(text))
        self._tip = _insert(self._open, self._tip, kind, text)

    def verify(self, head: str | None = None) -> None:
        """Check the whole file again, and that `head` is the digest of one of its rows."""
        self._forget()
        if self.path is not None:
            self._check_pages()
        with self.transaction():
            if head is not None and not self.holds(head.strip().lower()):
                raise LedgerDamaged(
                    f"{self._called} has no row with digest {head}: it is an older copy, another "
                    f"ledger, or was rewritten; {RESTORE}"
                )

    def holds(self, digest: str) -> bool:
        """Whether a row has this digest. Only inside a transaction."""
        assert self._open is not None
        query = "SELECT count(*) FROM log WHERE digest = ?"
        (count,) = self._open.execute(query, (digest,)).fetchone()
        return bool(count)

    def state_at(self, digest: str) -> LedgerState:
        """What the ledger knew at the row of this digest. Only inside a transaction."""
        assert self._open is not None
        state = LedgerState()
        rows = self._open.execute("SELECT kind, body, digest FROM log ORDER BY seq")
        for kind, body, stored in rows:  # checked already, as the transaction began
            state.apply(str(kind, "utf-8"), json.loads(body))
            if str(stored, "utf-8") == digest:
                break
        return state

    def write_anchor(self, anchor: str | os.PathLike[str]) -> None:
        """Write the head to a file, from which it can be followed (`anchor=`)."""
        with self.transaction():
            _write_anchor(Path(anchor).absolute(), self.identity, self._tip)

    def close(self) -> None:
        if self._in_memory is not None and self._process == current_process():
            self._in_memory.close()

    def _follow(self, db: sqlite3.Connection, anchor: Path) -> None:
        """Write the newest committed head to the anchor, one process at a time."""
        db.execute("BEGIN IMMEDIATE")
        try:
            _write_anchor(anchor, self.identity, self._read_head(db))
        finally:
            db.execute("ROLLBACK")

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        if self._in_memory is not None:
            if self._process != current_process():
                raise RuntimeError(
                    "a ledger in memory was carried into a forked process, where it would be "
                    "spent twice; give the ledger a file"
                )
            yield self._in_memory
            return
        with closing(self._connect()) as db:
            yield db

    def _connect(self) -> sqlite3.Connection:
        assert self.path is not None
        if not self.path.exists():
            raise LedgerDamaged(f"{self._called} was deleted while it was in use; {RESTORE}")
        # mode=rw: SQLite would make an empty file where there is none.
        address = f"{self.path.as_uri()}?mode=rw"
        db = sqlite3.connect(address, timeout=WAIT_SECONDS, isolation_level=None, uri=True)
        db.text_factory = bytes
        try:
            # The log is synced before a commit returns: what was charged survives a power cut.
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA fullfsync = ON")
        except BaseException:
            db.close()
            raise
        return db

    def _catch_up(self, db: sqlite3.Connection) -> LedgerState:
        """Check what is new in the file, and that it continues what is known; replay it."""
        _require_tables(db, self._called)
        head = self._read_head(db)
        if not self._contains(db, self.head):
            raise LedgerDamaged(
                f"{self._called} is not the file that this process has been charging: an older "
                f"copy or another ledger was put in its place; {RESTORE}"
            )
        rows = db.execute(
            "SELECT seq, kind, body, digest FROM log WHERE seq > ? ORDER BY seq", (self._tip.seq,)
        )
        for row in rows:
            self._check_row(*row)
        (count,) = db.execute("SELECT count(*) FROM log").fetchone()
        if head != self._tip or count != self._tip.seq:
            raise self._changed(f"its last row is {self._tip.seq}, where {head.seq} was written")
        if self.anchor is not None and self.anchor.exists():
            identity, kept = _read_anchor(self.anchor)
            if identity != self.identity or not self._contains(db, kept):
                raise LedgerDamaged(
                    f"{self._called} does not contain row {kept.seq}, which the anchor "
                    f"{self.anchor} names: it is an older copy, another ledger, or was rewritten; "
                    f"{RESTORE}"
                )
        return self._state

    def _check_row(self, seq: int, *texts: bytes) -> None:
        if seq != self._tip.seq + 1:
            raise self._changed(f"row {self._tip.seq + 1} is missing")
        try:
            kind, body, digest = (str(text, "utf-8") for text in texts)
            if digest != row_digest(self._tip, kind, body):
                raise self._changed(f"row {seq} is not the one that was written")
            stored = json.loads(body)
            if not isinstance(stored, dict):
                raise TypeError("it is no JSON object")
            self._state.apply(kind, stored)
        except LedgerDamaged:
            raise
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise self._changed(f"row {seq} cannot be read: {error}") from error
        self._tip = Head(seq, digest)
        if seq == 1:
            self.identity = digest

    def _read_head(self, db: sqlite3.Connection) -> Head:
        rows = db.execute("SELECT seq, digest FROM head").fetchall()
        if len(rows) != 1 or not isinstance(rows[0][0], int) or not isinstance(rows[0][1], bytes):
            raise self._changed("it does not say which row is the last")
        return Head(rows[0][0], rows[0][1].decode("utf-8", "replace"))

    def _contains(self, db: sqlite3.Connection, row: Head) -> bool:
        """Whether the file has this row."""
        query = "SELECT digest FROM log WHERE seq = ?"
        digests = [str(digest, "utf-8", "replace") for (digest,) in db.execute(query, (row.seq,))]
        return row == START or digests == [row.digest]

    def _changed(self, what: str) -> LedgerDamaged:
        return LedgerDamaged(f"{self._called} was changed outside of Tacit: {what}; {RESTORE}")

    def _check_pages(self) -> None:
        """SQLite's own check of the file, once when it is opened."""
        try:
            with self._connection() as db:
                (health,) = db.execute("PRAGMA quick_check(1)").fetchone()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._refuse_if_damaged(error)
            raise
        if health != b"ok":
            raise _damaged(self._called, health.decode("utf-8", "replace"))

    def _refuse_if_damaged(self, error: BaseException) -> None:
        """Raise LedgerDamaged if SQLite cannot read the file because of its content.

        Trouble with the disk or with other processes is something else. SQLite's message may hold
        bytes of the file that are no text: then Python raises UnicodeDecodeError instead.
        """
        code = getattr(error, "sqlite_errorcode", None)
        # The low byte is the kind of error.
        unreadable = code is not None and code & 0xFF not in _NOT_DAMAGE
        if unreadable or isinstance(error, UnicodeDecodeError):
            raise _damaged(self._called, str(error)) from error

    def _require_no_remains(self, file: Path) -> None:
        """A new database would be given what is in the write-ahead log of a deleted one."""
        remains = Path(f"{file}-wal")
        if remains.exists() and remains.stat().st_size > 0:
            raise LedgerDamaged(
                f"there is no ledger at {self._called}, but {remains.name} of a deleted one lies "
                f"there; {RESTORE}, or give a new ledger another name"
            )
        if self.anchor is not None and self.anchor.exists():
            raise LedgerDamaged(
                f"there is no ledger at {self._called}, and the anchor {self.anchor} belongs to "
                f"one; {RESTORE}, or give a new ledger an anchor of its own"
            )


def row_digest(before: Head, kind: str, body: str) -> str:
    """The digest of the row that follows `before`."""
    text = json.dumps([before.digest, before.seq + 1, kind, body], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _insert(db: sqlite3.Connection, before: Head, kind: str, body: str) -> Head:
    tip = Head(before.seq + 1, row_digest(before, kind, body))
    db.execute("INSERT INTO log VALUES (?, ?, ?, ?)", (tip.seq, kind, body, tip.digest))
    return tip


def _write_tables(db: sqlite3.Connection, budget: Budget) -> None:
    """The first row depends on the budget alone, so ledgers of one budget have one identity."""
    db.text_factory = bytes
    db.execute("BEGIN IMMEDIATE")
    for table in _TABLES.values():
        db.execute(table)
    first = {"format": FORMAT, **budget_fields(budget)}
    text = json.dumps(first, sort_keys=True, separators=(",", ":"))
    tip = _insert(db, START, "ledger", text)
    db.execute("INSERT INTO head VALUES (1, ?, ?)", (tip.seq, tip.digest))
    db.execute("COMMIT")


@contextmanager
def _draft_of(file: Path) -> Iterator[Path]:
    """Another name beside the file, to write it under first; removed at the end."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.new")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _create(file: Path, write: Callable[[sqlite3.Connection], None]) -> None:
    """Write the whole file as a draft, then link it to its name, unless another process did.

    A crash leaves no file, or a whole one, and a hard link never replaces an existing file.
    """
    with _draft_of(file) as draft:
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


def require_sqlite(file: Path, called: object) -> None:
    """Raise LedgerDamaged unless the file begins as an SQLite database does."""
    if not file.exists():
        raise LedgerDamaged(f"there is no ledger at {called}; {_GIVE_LEDGER}")
    if not file.is_file():
        raise LedgerDamaged(f"{called} is not a file, so no ledger; {_GIVE_LEDGER}")
    with file.open("rb") as opened:
        start = opened.read(20)
    if not start:
        raise LedgerDamaged(
            f"{called} is an empty file, and no ledger; if a ledger was here, restore its backup, "
            "else delete the file, and a new ledger can be made"
        )
    if start[: len(_MAGIC)] != _MAGIC:
        raise LedgerDamaged(f"{called} is not an SQLite database, so no ledger; {_GIVE_LEDGER}")
    # The versions of the format: from others SQLite reads only, or reads nothing.
    if start[18:20] not in (b"\1\1", b"\2\2"):
        raise _damaged(called, "an unknown version of the file format")


def _require_tables(db: sqlite3.Connection, called: object) -> None:
    """The two tables as they were made; no other table, no trigger, no view."""
    query = "SELECT CAST(name AS BLOB), CAST(sql AS BLOB) FROM sqlite_master"
    tables = dict(db.execute(query))
    if tables == {name.encode(): sql.encode() for name, sql in _TABLES.items()}:
        return
    names = {str(name or b"", "utf-8", "replace") for name in tables}
    if {"budget", "runs"} <= names:
        raise LedgerDamaged(
            f"{called} is a ledger of format 1, made by Tacit 0.1, whose stored limits cannot be "
            "checked; see with Tacit 0.1 what is charged (tacit ledger show), and start a new "
            "ledger with the epsilon and delta that are left"
        )
    unknown = sorted(names - set(_TABLES))
    what = "its tables are not those of a ledger"
    if unknown:
        what = f"its table {unknown[0]!r} is not one of a ledger's"
    raise LedgerDamaged(f"{called} is an SQLite database, but no ledger: {what}; {_GIVE_LEDGER}")


def _damaged(called: object, what: str) -> LedgerDamaged:
    said = what.splitlines()[-1] if what else "no more is known"
    return LedgerDamaged(f"{called} is damaged or cut short ({said}), so no ledger; {RESTORE}")


def _read_anchor(file: Path) -> tuple[str, Head]:
    """The identity of the ledger, and the head that it had."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        identity, head = stored["ledger"], Head(stored["seq"], stored["digest"])
        if not (isinstance(identity, str) and isinstance(head.digest, str)):
            raise TypeError("a digest is no text")
        if type(head.seq) is not int or not 1 <= head.seq < 2**63:
            raise TypeError("the number of a row is none")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise LedgerDamaged(
            f"{file} is not the anchor of a ledger, or was changed; check the ledger by other "
            "means, delete the file, and write it anew: tacit ledger anchor LEDGER ANCHOR"
        ) from error
    return identity, head


def _write_anchor(file: Path, identity: str, head: Head) -> None:
    """Replace the anchor in one step, durably: a crash leaves the old one or the new one."""
    with _draft_of(file) as draft:
        with draft.open("w", encoding="utf-8") as opened:
            json.dump({"ledger": identity, "seq": head.seq, "digest": head.digest}, opened)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(draft, file)
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
