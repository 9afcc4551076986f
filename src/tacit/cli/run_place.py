"""The folder and the ledger of a run of `tacit train`."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tacit.accounting.ledger import Ledger
from tacit.accounting.plan import Plan
from tacit.budget import Budget

FORGOTTEN = (
    "this run replaced an earlier one together with its ledger: what that one spent on the same "
    "data is not counted here; hold several runs to one budget with --ledger"
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
        raise ValueError(f"{folder} holds a run already; give another --out, or --overwrite")


def make_room(folder: Path, shared: Path | None = None) -> bool:
    """A folder without an earlier run, and whether a ledger was thrown away for it.

    The file given as --ledger stays, wherever it lies.
    """
    held = _files(folder, shared, _RUN + _ABOUT_IT + _LEDGER)
    for file in held:
        file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "ledger.sqlite" in held


def open_ledger(file: Path, budget: Budget) -> Ledger:
    """The ledger in the file, or a new one for this budget if it is missing or empty."""
    try:
        fresh = not file.exists() or (file.is_file() and file.stat().st_size == 0)
        return Ledger(file, budget) if fresh else Ledger(file)
    except sqlite3.Error as error:
        raise ValueError(
            f"the ledger {file} cannot be opened ({error}); give a file that can be written"
        ) from error


def ask_for_room(book: Ledger, plan: Plan, name: str | None, budget: Budget) -> tuple[int, int]:
    """The events that the run of this name was charged for, and the most it can be.

    Raises what the ledger raises if it does not let the run in: ask before anything that cannot be
    undone. Nothing is charged but what comes before the first step, which the run goes on with.
    """
    book.begin(plan, name=name, budget=budget)
    try:
        return book.run_status()
    finally:
        book.end()
