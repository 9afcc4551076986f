"""The ledger's file: an append-only log whose rows form a hash chain.

The ledger's file: an append-only log whose rows form a hash chain.

Format 2. An SQLite database in WAL mode, synced on every commit, with two tables and nothing else:

    log(seq, kind, body, digest)     rows 1, 2, 3, …; `body` is a JSON object
    head(only_row, seq, digest)      one row: the last row of the log

    digest_n = SHA-256 of the JSON array [digest_{n−1}, n, kind_n, body_n],   digest_0 = "tacit 2"

What the rows mean is in `ledger_state`, which obtains everything by replaying them; there is no
other state. The digest of row 1, the budget, is the ledger's *identity*. The digest of the last
row is its *head*.

What is noticed, as LedgerDamaged:

- a row that was edited, deleted (the last one too), inserted or moved, when the file is opened;
- every transaction checks again that the file continues what this process has seen, so that a
  file which is put back, cut or forked while a process runs is noticed as well;
- whoever can write the file can also compute a whole chain anew, or put back an old copy before a
  process opens it. Only a head that was kept elsewhere finds that: the printed one
  (`tacit ledger verify FILE --head …`), or an *anchor*, a small file with the latest head. It is
  replaced after each commit, so a crash may leave it behind the ledger; a ledger behind its anchor,
  or without the anchored row, is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tacit.errors import LedgerDamaged
from tacit.ledger import ledger_file
from tacit.ledger.ledger_file import (
    NOT_DAMAGE,
    RESTORE,
    TABLES,
    Head,
    create,
    damaged,
    read_anchor,
    require_sqlite,
    require_tables,
    write_anchor,
)

FORMAT = 2
_START = Head(0, f"tacit {FORMAT}")


class Replayed(Protocol):
    """What the rows amount to. `apply` raises an error (ValueError, TypeError, …) for a bad row."""

    def apply(self, kind: str, body: dict[str, Any]) -> None: ...


State = TypeVar("State", bound=Replayed)


@dataclass(frozen=True)
class FirstRow:
    """The row that a new ledger begins with."""

    kind: str
    body: dict[str, Any]


class LedgerLog(Generic[State]):
    """Appends rows and replays them; decides nothing. All decisions are made in `transaction`.

    `replay` makes an empty state. `first` makes a new file where there is none; `path=None` keeps
    the log in memory. A connection lasts for one transaction: SQLite keeps the state of its locks
    in the process's memory, and a fork that inherited an open connection could lose charges.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        replay: Callable[[], State],
        first: FirstRow | None = None,
        *,
        anchor: str | os.PathLike[str] | None = None,
        called: str | os.PathLike[str] | None = None,
    ) -> None:
        self.path = None if path is None else Path(path).absolute()
        self.anchor = None if anchor is None else Path(anchor).absolute()
        self._called = called or self.path or "the ledger in memory"
        self._replay = replay
        self._state: State | None = None
        self._tip = _START  # the last row that `_state` holds
        self._seen: Head | None = None  # the last row known to be on disk
        self._identity = ""
        self._pid = os.getpid()
        self._open: sqlite3.Connection | None = None
        self._in_memory: sqlite3.Connection | None = None
        if self.path is None:
            assert first is not None
            self._in_memory = sqlite3.connect(
                ":memory:", isolation_level=None, check_same_thread=False
            )
            _write_first_row(self._in_memory, first)
        else:
            file = Path(os.path.realpath(self.path))
            if first is not None and not file.exists():
                self._require_no_remains(file)
                create(file, lambda db: _write_first_row(db, first))
            require_sqlite(file, self._called)
            self._check_pages()
        with self.transaction():
            if self.anchor is not None and not self.anchor.exists() and self._tip.seq > 1:
                raise LedgerDamaged(
                    f"there is no anchor at {self.anchor}, and {self._called} has been used; if "
                    "this is its newest copy, make one: tacit ledger anchor LEDGER ANCHOR"
                )
        if self.anchor is not None and not self.anchor.exists():
            self.write_anchor(self.anchor)

    @property
    def head(self) -> Head:
        """The last row, as of the latest transaction."""
        assert self._seen is not None
        return self._seen

    @property
    def identity(self) -> str:
        return self._identity

    @contextmanager
    def transaction(self) -> Iterator[State]:
        """One writer at a time, over all processes; what was appended is durable on return."""
        try:
            with self._connection() as db:
                self._open = db
                try:
                    db.execute("BEGIN IMMEDIATE")
                    try:
                        state = self._catch_up(db)
                    except (TypeError, ArithmeticError) as error:  # of a cell that was changed
                        raise damaged(self._called, str(error)) from error
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
                self._seen = self._tip
                if self.anchor is not None and self._tip != before:
                    self._follow(db, self.anchor)
        except BaseException as error:
            self._state, self._tip = None, _START  # it may hold rows that were not committed
            self._refuse_if_damaged(error)
            raise
        finally:
            self._open = None

    def append(self, kind: str, **body: Any) -> None:
        """Add a row. It is replayed as it will be read: what is unreadable is not committed."""
        assert self._open is not None, "only inside a transaction"
        assert self._state is not None
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        self._state.apply(kind, json.loads(text))
        self._tip = _insert(self._open, self._tip, kind, text)

    def verify(self, head: str | None = None) -> None:
        """Check the whole file again, and that `head` is the digest of one of its rows."""
        self._state, self._tip = None, _START
        if self.path is not None:
            self._check_pages()
        with self.transaction():
            if head is None:
                return
            query = "SELECT count(*) FROM log WHERE digest = ?"
            assert self._open is not None
            (found,) = self._open.execute(query, (head.strip().lower(),)).fetchone()
            if not found:
                raise LedgerDamaged(
                    f"{self._called} has no row with digest {head}: it is an older copy, another "
                    f"ledger, or was rewritten; {RESTORE}"
                )

    def write_anchor(self, anchor: str | os.PathLike[str]) -> None:
        """Write the head to a file, from which it can be followed (`anchor=`)."""
        with self.transaction():
            write_anchor(Path(anchor).absolute(), self._identity, self._tip)

    def close(self) -> None:
        if self._in_memory is not None and os.getpid() == self._pid:
            self._in_memory.close()

    def _follow(self, db: sqlite3.Connection, anchor: Path) -> None:
        """Write the newest committed head to the anchor, one process at a time."""
        db.execute("BEGIN IMMEDIATE")
        try:
            write_anchor(anchor, self._identity, self._read_head(db))
        finally:
            db.execute("ROLLBACK")

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        if self._in_memory is not None:
            if os.getpid() != self._pid:
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
        db = sqlite3.connect(
            address, timeout=ledger_file.WAIT_SECONDS, isolation_level=None, uri=True
        )
        db.text_factory = bytes
        try:
            # The log is synced before a commit returns: what was charged survives a power cut.
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA fullfsync = ON")
        except BaseException:
            db.close()
            raise
        return db

    def _catch_up(self, db: sqlite3.Connection) -> State:
        """Check what is new in the file, and that it continues what is known; replay it."""
        require_tables(db, self._called)
        head = self._read_head(db)
        if self._state is None:
            self._state, self._tip = self._replay(), _START
        elif self._digest_at(db, self._tip.seq) != self._tip.digest:
            raise self._put_back()
        rows = db.execute(
            "SELECT seq, kind, body, digest FROM log WHERE seq > ? ORDER BY seq", (self._tip.seq,)
        )
        for row in rows:
            self._check_row(*row)
        (count,) = db.execute("SELECT count(*) FROM log").fetchone()
        if head != self._tip or count != self._tip.seq:
            raise self._changed(f"its last row is {self._tip.seq}, where {head.seq} was written")
        if self._seen is not None and self._digest_at(db, self._seen.seq) != self._seen.digest:
            raise self._put_back()
        if self.anchor is not None and self.anchor.exists():
            identity, kept = read_anchor(self.anchor)
            if identity != self._identity or self._digest_at(db, kept.seq) != kept.digest:
                raise LedgerDamaged(
                    f"{self._called} does not contain row {kept.seq}, which the anchor "
                    f"{self.anchor} names: it is an older copy, another ledger, or was rewritten; "
                    f"{RESTORE}"
                )
        return self._state

    def _check_row(self, seq: int, *texts: object) -> None:
        assert self._state is not None
        if seq != self._tip.seq + 1:
            raise self._changed(f"row {self._tip.seq + 1} is missing")
        try:
            kind, body, digest = (_decoded(text) for text in texts)
            if digest != _digest(self._tip, kind, body):
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
            self._identity = digest

    def _read_head(self, db: sqlite3.Connection) -> Head:
        rows = db.execute("SELECT seq, digest FROM head").fetchall()
        if len(rows) != 1 or not isinstance(rows[0][0], int) or not isinstance(rows[0][1], bytes):
            raise self._changed("it does not say which row is the last")
        return Head(rows[0][0], rows[0][1].decode("utf-8", "replace"))

    def _digest_at(self, db: sqlite3.Connection, seq: int) -> str | None:
        row = db.execute("SELECT digest FROM log WHERE seq = ?", (seq,)).fetchone()
        return None if row is None else bytes(row[0]).decode("utf-8", "replace")

    def _changed(self, what: str) -> LedgerDamaged:
        return LedgerDamaged(f"{self._called} was changed outside of Tacit: {what}; {RESTORE}")

    def _put_back(self) -> LedgerDamaged:
        return LedgerDamaged(
            f"{self._called} is not the file that this process has been charging: an older copy or "
            f"another ledger was put in its place; {RESTORE}"
        )

    def _check_pages(self) -> None:
        """SQLite's own check of the file, once when it is opened."""
        try:
            with self._connection() as db:
                (health,) = db.execute("PRAGMA quick_check(1)").fetchone()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._refuse_if_damaged(error)
            raise
        if health != b"ok":
            raise damaged(self._called, health.decode("utf-8", "replace"))

    def _refuse_if_damaged(self, error: BaseException) -> None:
        """Raise LedgerDamaged if SQLite cannot read the file for what is in it.

        Trouble with the disk, or with other processes, is not that. SQLite's own message may hold
        bytes of the file, which are no text: then Python raises UnicodeDecodeError instead.
        """
        code = getattr(error, "sqlite_errorcode", None)
        # The low byte is the kind of error.
        unreadable = code is not None and code & 0xFF not in NOT_DAMAGE
        if unreadable or isinstance(error, UnicodeDecodeError):
            raise damaged(self._called, str(error)) from error

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


def _decoded(value: object) -> str:
    if not isinstance(value, bytes):
        raise TypeError("it does not hold text")
    return value.decode("utf-8")


def _digest(before: Head, kind: str, body: str) -> str:
    text = json.dumps([before.digest, before.seq + 1, kind, body], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _insert(db: sqlite3.Connection, before: Head, kind: str, body: str) -> Head:
    tip = Head(before.seq + 1, _digest(before, kind, body))
    db.execute("INSERT INTO log VALUES (?, ?, ?, ?)", (tip.seq, kind, body, tip.digest))
    return tip


def _write_first_row(db: sqlite3.Connection, first: FirstRow) -> None:
    db.text_factory = bytes
    db.execute("BEGIN IMMEDIATE")
    for table in TABLES.values():
        db.execute(table)
    body = json.dumps(first.body, sort_keys=True, separators=(",", ":"))
    tip = _insert(db, _START, first.kind, body)
    db.execute("INSERT INTO head VALUES (1, ?, ?)", (tip.seq, tip.digest))
    db.execute("COMMIT")
