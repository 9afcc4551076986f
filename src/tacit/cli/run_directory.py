"""The folder of a run: what may be written there, and what is read back from it.

A folder holds one run. With --overwrite the files of an earlier run are replaced, and its ledger
stays: charges are never deleted.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tacit.accounting.plan import Plan
from tacit.budget import Budget
from tacit.cli.finetune_settings import FinetuneSettings
from tacit.cli.schema import options_of, read_sections, to_dict
from tacit.cli.settings import TrainSettings
from tacit.data.download import whole_file
from tacit.errors import BudgetExceeded, TacitError
from tacit.ledger import Ledger, read_statement
from tacit.ledger.store import sync_folder
from tacit.report.folder_files import (
    FILES,
    LANGUAGE_MODEL,
    MODEL_FOLDER,
    RESUME_FILE,
    unfinished_command,
    write_json,
)
from tacit.report.page import PAGE
from tacit.report.privacy_statement import plan_of, steps_of_epsilon
from tacit.report.read_folder import read_facts
from tacit.report.saved_facts import DIAGNOSTICS
from tacit.report.saved_run import SavedRun
from tacit.training.run import Run
from tacit.training.state_file import CHECKPOINT

REPLACED_NOTE = (
    "this run replaced an earlier one in its folder; the ledger there keeps the charges of both, "
    "and epsilon is this run's alone: see tacit ledger show"
)
_LEDGER = tuple(f"ledger.sqlite{suffix}" for suffix in ("", "-wal", "-shm"))
# Written by other commands, or not by every run: they would describe the earlier run.
_DERIVED = (
    *("certificate.json", "certified.png", "trade_off.png", "model.onnx", PAGE, DIAGNOSTICS),
    "preprocessing.safetensors",  # of an earlier version
)
RELEASE_KEY = "release.key"
_RELEASE_KEY_DRAFT = f".{RELEASE_KEY}.new"  # one name: a kill leaves one of them at most
# Of a run that is not complete.
_UNFINISHED = (RESUME_FILE, CHECKPOINT, RELEASE_KEY, _RELEASE_KEY_DRAFT)


# ---- before and after training -------------------------------------------------------------------


def new_folder(stem: str) -> Path:
    """A folder under runs/ that does not exist yet."""
    name = f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder, copies = Path("runs") / name, 1
    while folder.exists():
        copies += 1
        folder = Path("runs") / f"{name}-{copies}"
    return folder


def check_folder(folder: Path, overwrite: bool, shared: Path | None = None) -> None:
    """Raise if the folder holds a run that nobody asked to replace, or cannot hold one.

    `shared` is a ledger that other runs use too. It must not be a file that a run replaces.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is {folder}, which is a file; give a folder")
    for name in (*FILES, *_DERIVED, *_UNFINISHED, *_LEDGER[1:]):
        if shared is not None and _same(folder / name, shared):
            raise ValueError(
                f"--ledger is {shared}, where a run in {folder} writes its own {name}; give "
                "another file"
            )
    own_ledger = shared is None or not _same(folder / _LEDGER[0], shared)
    files = (*FILES, RESUME_FILE, *(_LEDGER if own_ledger else ()))
    if (folder / RESUME_FILE).exists() and not overwrite:
        raise ValueError(
            f"{folder} holds a run that is not complete; resume it with: tacit "
            f"{unfinished_command(folder) or 'train'} --resume {folder}, or give another --out, or "
            "--overwrite: the ledger stays, and is charged"
        )
    if any((folder / name).exists() for name in files) and not overwrite:
        raise ValueError(
            f"{folder} holds a run already; give another --out, or, if its ledger has budget left "
            "for another run, --overwrite: the ledger stays, and is charged"
        )


@contextmanager
def removed_if_unused(folder: Path, ledger: Path) -> Iterator[None]:
    """If what is inside fails before anything was charged, remove the files that it made.

    A charge is never removed, and neither is a file that was there before.
    """
    before = {file for file in (ledger, *folder.glob("*")) if file.exists()}
    try:
        yield
    except BaseException:
        if ledger.exists() and not _is_unused(ledger):
            raise
        for name in (*FILES, *_UNFINISHED, *_LEDGER):
            if folder / name not in before and not (ledger in before and name in _LEDGER):
                (folder / name).unlink(missing_ok=True)
        if ledger not in before:
            ledger.unlink(missing_ok=True)
        raise


def _is_unused(ledger: Path) -> bool:
    """Whether the ledger holds no run: one that ends before it was charged is dropped."""
    try:
        return not read_statement(ledger).runs
    except (TacitError, ValueError, OSError, sqlite3.Error):
        return False


def clear_folder(folder: Path) -> bool:
    """Remove the files of an earlier run, and say whether there was one. Ledgers always stay."""
    names = (*FILES, *_DERIVED, *_UNFINISHED)
    files = [folder / name for name in names if (folder / name).exists()]
    if _holds_language_model(folder):
        shutil.rmtree(folder / MODEL_FOLDER, ignore_errors=True)
    for file in files:
        file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return any(file.name in FILES for file in files)


def _holds_language_model(folder: Path) -> bool:
    """Whether the run in `folder` is one of `tacit finetune`, which wrote a folder of its own."""
    if unfinished_command(folder) == FinetuneSettings.command:
        return True
    try:
        kind = read_facts(folder)["model"]["architecture"]["kind"]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(kind == LANGUAGE_MODEL)


def write_resume_file(
    folder: Path, settings: TrainSettings | FinetuneSettings, run_name: str, seed: int
) -> None:
    """What `--resume` reads: the command and its settings, and the seed of the initial weights."""
    told = to_dict(replace(settings, run_name=run_name, out=folder, resume=None))
    facts = {"command": settings.command, "config": {"settings": told}, "initial_seed": seed}
    write_json(facts, folder / RESUME_FILE)
    with (folder / RESUME_FILE).open("rb+") as opened:  # Windows syncs only what may be written
        os.fsync(opened.fileno())
    sync_folder(folder)


def read_release_key(folder: Path) -> bytes | None:
    """The secret that the noise of the run's ranges, counts and scaling is derived from, if any."""
    file = folder / RELEASE_KEY
    if not file.is_file():
        return None
    try:
        key = bytes.fromhex(file.read_text(encoding="ascii"))
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ValueError(f"{file} is not as tacit train wrote it; restore it, or start another run")
    return key


def write_release_key(folder: Path) -> bytes:
    """A new secret, written durably, whole or not at all, and readable by its owner alone.

    Until it is deleted, whoever reads it can remove the noise: the folder is then as private as
    the records. It is written before the first claim and deleted as soon as preprocessing.json is
    on disk, before the first step. Deleting it does not reach a backup that was made in between.
    """
    key, draft = secrets.token_bytes(32), folder / _RELEASE_KEY_DRAFT
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(key.hex())
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(draft, folder / RELEASE_KEY)
    sync_folder(folder)
    return key


def delete_release_key(folder: Path) -> None:
    """Delete the secret. What was released is in preprocessing.json, which was saved just now."""
    keys = [folder / RELEASE_KEY, folder / _RELEASE_KEY_DRAFT]
    if not any(key.exists() for key in keys):
        return
    sync_folder(folder)  # so that preprocessing.json survives a power cut in which this is gone
    for key in keys:
        key.unlink(missing_ok=True)
    sync_folder(folder)


def write_held_out(file: Path, rows: Iterable[int]) -> None:
    """The rows of --data that were held out, counted from 0, for the owner of the data."""
    with whole_file(file) as draft:
        draft.write_text("".join(f"{row}\n" for row in ("row", *sorted(rows))), encoding="utf-8")


def initial_seed(folder: Path) -> int:
    """The seed of PyTorch's generator that the weights of the run in `folder` began with."""
    if not (folder / RESUME_FILE).is_file():  # it was there when its settings were read
        raise ValueError(f"the run in {folder} was completed by another process meanwhile")
    stored = json.loads((folder / RESUME_FILE).read_text(encoding="utf-8"))
    seed = stored.get("initial_seed")
    if type(seed) is not int or not -(2**63) <= seed < 2**64:
        raise ValueError(f"{folder / RESUME_FILE} holds no seed; start another run")
    return seed


def remove_unfinished(folder: Path) -> None:
    """Of a run that is complete, and whose files are written."""
    for name in _UNFINISHED:
        (folder / name).unlink(missing_ok=True)


def _same(file: Path, other: Path) -> bool:
    """Whether two paths lead to one file, which need not exist yet."""
    if file.exists() and other.exists():
        return file.samefile(other)
    return file.resolve() == other.resolve()


def open_ledger(file: Path, budget: Budget) -> Ledger:
    """The ledger in the file, or a new one for this budget if there is no file."""
    try:
        return Ledger(file) if file.exists() else Ledger(file, budget)
    except sqlite3.Error as error:
        raise ValueError(
            f"the ledger {file} cannot be opened ({error}); give a file that can be written"
        ) from error


def admit_run(ledger: Ledger, plan: Plan, name: str | None, budget: Budget) -> tuple[int, int]:
    """The events that the run of this name has been charged for, and its limit.

    Raises what the ledger raises if it does not admit the run: call this before anything that
    cannot be undone. It charges only what comes before the first step, which the run resumes with.
    """
    try:
        ledger.begin(plan, name=name, budget=budget)
    except BudgetExceeded as error:
        raise BudgetExceeded(
            f"the ledger {ledger.path} refuses this run: {error}. Charges are never deleted, not "
            "even by --overwrite. For several runs over the same records, make a ledger with a "
            "larger budget (tacit ledger create) and give it to each with --ledger; a run over "
            "other records goes to another --out"
        ) from error
    try:
        return ledger.run_status()
    finally:
        ledger.end()


def delta_note(delta: float, num_records: int) -> list[str]:
    """δ ≥ 1/N allows what nobody would call private; N is public. Empty if δ is below that."""
    if delta * num_records < 1:
        return []
    return [
        f"δ = {delta:g} is not below 1/N for N = {num_records} records: publishing each record "
        "whole with probability δ would keep this promise too, and would show at least one record "
        "in expectation; give a --delta well below 1/N"
    ]


def no_step_note(run: Run, charged_before: int, limit: int) -> list[str]:
    """Why a run took no step. Empty if it took one.

    `charged_before` and `limit` are the run's events on its ledger before it was resumed.
    """
    if run.steps > 0:
        return []
    planned, initial = run.plan.steps, "the weights are the initial ones"
    if planned == 0:
        why = "--steps is 0"
    elif run.stopped != "budget":
        why = f"the run was ended before its first ({run.stopped})"
    elif limit == 0:
        why = (
            f"one step with noise multiplier {run.plan.noise_multiplier:g} would pass the budget, "
            f"epsilon {run.budget.epsilon:g} at delta {run.budget.delta:g}, or that of its ledger"
        )
    elif charged_before < limit:
        why = "the other runs of the ledger leave no budget for one"
    elif planned is not None and charged_before >= run.plan.scheme.num_events(planned):
        why = "the run of this name was complete on its ledger already"
        initial += ", not those that it had reached"
    else:
        why = "the run of this name had spent its budget on the ledger already"
    return [f"no step was taken: {why}; {initial}"]


# ---- a saved run ---------------------------------------------------------------------------------


def settings_of(run: SavedRun) -> TrainSettings:
    """The settings of a run of `tacit train`, or an error that says what is missing."""
    try:
        values = read_sections(TrainSettings, run.facts["config"]["settings"])
        for name, o in options_of(TrainSettings).items():
            if values.get(name) is not None:
                o.require(values[name])
        return TrainSettings(**values)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"{run.folder}/run.json holds no settings ({type(error).__name__}: {error}); it was "
            "not made by tacit train. In Python: "
            "tacit.certificates.certified_accuracy(model, records)"
        ) from error


class SavedPlan(NamedTuple):
    """A run's plan, how many of its steps the run answers for, and its δ and ε."""

    plan: Plan
    steps: int
    delta: float
    epsilon: float


def read_plan(folder: Path) -> SavedPlan:
    """The plan of the run in `folder`, or an error that says what is missing."""
    facts = read_facts(folder)
    try:
        plan = plan_of(facts)
        return SavedPlan(
            plan, steps_of_epsilon(facts, plan), float(facts["delta"]), float(facts["epsilon"])
        )
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"{folder}/run.json does not hold a run's plan ({type(error).__name__}: {error}); "
            "in Python: tacit.trade_off(noise_multiplier, sampling, steps)"
        ) from error
