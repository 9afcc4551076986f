"""The head of a ledger, kept in a file elsewhere: it finds an old copy that was put back."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from tacit.errors import LedgerDamaged


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
