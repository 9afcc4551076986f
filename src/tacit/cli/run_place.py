"""The folder and the ledger of a run of `tacit train`."""

from __future__ import annotations

from pathlib import Path

from tacit.accounting.ledger import Ledger
from tacit.budget import Budget

FORGOTTEN = (
    "this run replaced an earlier one together with its ledger: what that one spent on the same "
    "data is not counted here; hold several runs to one budget with --ledger"
)


def _files(folder: Path) -> list[Path]:
    files = [folder / n for n in ("run.json", "weights.safetensors", "progress.png")]
    files += [folder / f"ledger.sqlite{suffix}" for suffix in ("", "-wal", "-shm")]
    return [file for file in files if file.exists()]


def require_room(folder: Path, overwrite: bool) -> None:
    """Raise if the folder holds a run that nobody asked to replace."""
    if _files(folder) and not overwrite:
        raise ValueError(f"{folder} holds a run already; give another --out, or --overwrite")


def make_room(folder: Path) -> bool:
    """An empty folder for the run, and whether a ledger was thrown away for it."""
    held = _files(folder)
    for file in held:
        file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "ledger.sqlite" in held


def open_ledger(shared: Path | None, folder: Path, budget: Budget) -> Ledger:
    if shared is None:
        return Ledger(folder / "ledger.sqlite", budget)
    return Ledger(shared) if shared.exists() else Ledger(shared, budget)
