"""The folder and the ledger of a run of `tacit train`."""

from __future__ import annotations

import datetime
import sqlite3
from pathlib import Path

from tacit.accounting.plan import Plan
from tacit.budget import Budget
from tacit.errors import BudgetExceeded
from tacit.ledger import Ledger

KEPT = (
    "this run replaced an earlier one in its folder; the ledger there keeps the charges of both, "
    "and epsilon is this run's alone: see tacit ledger show"
)
_LEDGER = tuple(f"ledger.sqlite{suffix}" for suffix in ("", "-wal", "-shm"))
_RUN = ("run.json", "weights.safetensors", "progress.png", "preprocessing.safetensors")
# Written by other commands, or not by every run: they would speak of the run before.
_ABOUT_IT = ("certificate.json", "certified.png", "trade_off.png")


def _files(folder: Path, shared: Path | None, names: tuple[str, ...]) -> list[Path]:
    """The files of these names that are there; never the shared ledger, nor its log."""
    kept: tuple[str, ...] = ()
    if shared is not None and _same(folder / "ledger.sqlite", shared):
        kept = _LEDGER
    files = [folder / name for name in names if name not in kept]
    return [f for f in files if f.exists() and not (shared is not None and _same(f, shared))]


def _same(file: Path, other: Path) -> bool:
    """Whether two paths lead to one file, which need not be there yet."""
    if file.exists() and other.exists():
        return file.samefile(other)
    return file.resolve() == other.resolve()


def require_room(folder: Path, overwrite: bool, shared: Path | None = None) -> None:
    """Raise if the folder holds a run that nobody asked to replace, or cannot hold one."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is {folder}, which is a file; give a folder")
    for name in (*_RUN, *_ABOUT_IT, *_LEDGER[1:]):
        if shared is not None and _same(folder / name, shared):
            raise ValueError(
                f"--ledger is {shared}, where a run in {folder} writes its own {name}; give "
                "another file"
            )
    if _files(folder, shared, _RUN + _LEDGER) and not overwrite:
        raise ValueError(
            f"{folder} holds a run already; give another --out, or, if its ledger has budget left "
            "for another run, --overwrite: the ledger stays, and is charged"
        )


def fresh_folder(stem: str) -> Path:
    """A folder under runs/ that is not there yet."""
    name = f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder, copies = Path("runs") / name, 1
    while folder.exists():
        copies += 1
        folder = Path("runs") / f"{name}-{copies}"
    return folder


def make_room(folder: Path, shared: Path | None = None) -> bool:
    """Remove the files of an earlier run, and say whether there was one. Ledgers always stay."""
    held = _files(folder, shared, _RUN + _ABOUT_IT)
    for file in held:
        file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return any(file.name in _RUN for file in held)


def open_ledger(file: Path, budget: Budget) -> Ledger:
    """The ledger in the file, or a new one for this budget if there is no file."""
    try:
        return Ledger(file) if file.exists() else Ledger(file, budget)
    except sqlite3.Error as error:
        raise ValueError(
            f"the ledger {file} cannot be opened ({error}); give a file that can be written"
        ) from error


def ask_for_room(book: Ledger, plan: Plan, name: str | None, budget: Budget) -> tuple[int, int]:
    """The events that the run of this name was charged for, and the most it can be.

    Raises what the ledger raises if it does not let the run in: ask before anything that cannot be
    undone. Nothing is charged but what comes before the first step, which the run goes on with.
    """
    try:
        book.begin(plan, name=name, budget=budget)
    except BudgetExceeded as error:
        raise BudgetExceeded(
            f"the ledger {book.path} refuses this run: {error}. Charges are never deleted, by "
            "--overwrite neither. For several runs over the same records, make a ledger with a "
            "larger budget (tacit ledger create) and give it to each with --ledger; a run over "
            "other records goes to another --out"
        ) from error
    try:
        return book.run_status()
    finally:
        book.end()
