"""How a run of `tacit train` or `tacit finetune` is started: in one process, or on several ranks.

Under `torchrun` the first rank writes the folder, keeps the ledger and prints. Ranks that torchrun
starts again, since one of them died, go on from the checkpoint.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from tacit.cli.console import device_for, join_ranks, ranks_started, tells_error
from tacit.cli.finetune_settings import FinetuneSettings
from tacit.cli.schema import read_resumed
from tacit.cli.settings import TrainSettings
from tacit.errors import PlanChanged, TacitError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tacit.ledger import Ledger
    from tacit.ranks import Ranks
    from tacit.training import Checkpoint
    from tacit.training.run import Run
    from tacit.training.trainer import Trainer

S = TypeVar("S", TrainSettings, FinetuneSettings)
Facts = dict[str, Any]


def launched(
    s: S, train_in: Callable[[Path, S, DeviceMesh | None], Facts], stem: str
) -> tuple[Facts, Path]:
    """Run `train_in(folder, settings, mesh)`; the facts of the run on the first rank, its folder.

    A folder that the settings do not name is one under runs/, called after `stem`.
    """
    # This imports torch, for which the help must not wait.
    from tacit.cli import run_directory
    from tacit.training.state_file import only_process

    if ranks_started() > 1:
        return _launched_on_ranks(s, train_in)
    if s.shard and s.resume is None:
        raise ValueError(
            "--shard shares weights out over the ranks that torchrun starts, and this is one "
            f"process; leave it out, or start: torchrun --nproc-per-node N -m tacit {s.command} ..."
        )
    folder = s.out or run_directory.new_folder(stem)
    if s.resume is None:  # and once more when no other process can write there
        run_directory.check_folder(folder, s.overwrite, s.ledger)
    with only_process(folder):
        return train_in(folder, s, None), folder


def ended_meanwhile(folder: Path) -> bool:
    """Whether these ranks were started again after the run's last step, when all was saved."""
    return _started_again() and (folder / "run.json").exists() and not is_unfinished(folder)


def _started_again() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def is_unfinished(folder: Path) -> bool:
    """Whether the folder holds a run that can be resumed."""
    from tacit.report.folder_files import RESUME_FILE

    return (folder / RESUME_FILE).exists()


def _launched_on_ranks(
    s: S, train_in: Callable[[Path, S, DeviceMesh | None], Facts]
) -> tuple[Facts, Path]:
    import torch.distributed as dist

    from tacit.cli import run_directory
    from tacit.ranks import Ranks
    from tacit.report.read_folder import read_facts
    from tacit.training.state_file import only_process

    folder = s.resume or s.out
    if folder is None:
        raise ValueError(
            "under torchrun the run needs a folder that ranks find again after a restart; give "
            "--out runs/x"
        )
    mesh = join_ranks(device_for(s.device))
    try:
        ranks = Ranks(mesh)

        def found() -> str:
            if _started_again() and s.resume is None and is_unfinished(folder):
                return "go on"
            if ended_meanwhile(folder):
                return "done"
            if s.resume is None:
                run_directory.check_folder(folder, s.overwrite or _started_again(), s.ledger)
            return "begin"

        state = ranks.on_first(found)
        if state == "done":
            return read_facts(folder), folder
        if state == "go on":
            stored = ranks.on_first(lambda: read_resumed(type(s), folder, {"resume": folder}))
            s = type(s)(**stored)
        elif _started_again():
            s = replace(s, overwrite=True)  # nothing was charged before the settings were written
        with only_process(folder) if ranks.is_first else nullcontext():
            facts = train_in(folder, s, mesh)
        dist.barrier()
        return facts, folder
    except Exception as error:
        lost = ("gloo", "NCCL", "Connection closed by peer")
        if not isinstance(error, RuntimeError) or not any(word in str(error) for word in lost):
            tells_error()  # before the others see that this rank is gone
            raise
        raise TacitError(
            "another rank has ended, and with it this step: what was charged stays charged, and "
            "nothing else was released; resume the run with: torchrun ... -m tacit "
            f"{s.command} --resume {folder}"
        ) from error
    finally:
        dist.destroy_process_group()


# ---- inside of a run -----------------------------------------------------------------------------


def initial_seed(folder: Path, s: S, ranks: Ranks | None) -> int:
    """The seed of PyTorch's generator that the weights begin with, the same on all ranks.

    Of a run that is resumed, that of its first attempt. The seed of weights is not secret.
    """
    from tacit.cli import run_directory

    if s.resume is not None and s.checkpoint_every == 0:
        raise ValueError(
            "--checkpoint-every is 0, and a resumed run keeps its checkpoint up to date; leave "
            "it out, or give a number of steps"
        )

    def seed() -> int:
        if s.resume is not None:
            return run_directory.initial_seed(folder)
        run_directory.check_folder(folder, s.overwrite, s.ledger)
        return secrets.randbits(63) if s.seed is None else s.seed

    return seed() if ranks is None else ranks.on_first(seed)


def run_name(folder: Path, s: S, ranks: Ranks | None) -> str:
    """The name of the run in its ledger, the same on all ranks."""
    name = s.run_name or f"{folder.name}-{secrets.token_hex(3)}"
    return name if ranks is None else ranks.from_first(name)


def checkpoint_in(folder: Path, s: S, with_frozen: bool = True) -> Checkpoint | None:
    """Where the run keeps its checkpoint, as the settings say; None for none."""
    from tacit.training import Checkpoint

    if s.checkpoint_every == 0:
        return None
    return Checkpoint(folder, s.checkpoint_every, s.checkpoint_minutes, with_frozen)


def fitted(
    folder: Path,
    s: S,
    trainer: Trainer,
    initial: int,
    prepare: Callable[[], None] = lambda: None,
) -> tuple[Run, Ledger | None]:
    """Begin or resume the run in its folder; the run, and its ledger on the first rank.

    Call this after what can be refused without a charge. The ledger admits the run before an
    earlier one in the folder is replaced, and the first rank calls `prepare` before the first step.
    """
    from tacit.cli import run_directory
    from tacit.training.state_file import CHECKPOINT

    ranks = trainer.ranks
    file = s.ledger or folder / "ledger.sqlite"
    if ranks is not None and not ranks.is_first:
        trainer.ledger = file  # which the first rank opens
        return trainer.fit(resume=folder if ranks.from_first(False) else None), None
    charged, limit = 0, 0
    may_hold_runs = file.exists() or s.ledger is not None
    with run_directory.removed_if_unused(folder, file):
        ledger = run_directory.open_ledger(file, trainer.budget)
        if may_hold_runs:
            try:
                charged, limit = run_directory.admit_run(
                    ledger, trainer.plan, trainer.run_name, trainer.budget
                )
            except PlanChanged as error:
                if s.resume is None:
                    raise
                raise PlanChanged(
                    f"the run in {folder} began with another number of records, or with another "
                    "version of Tacit; resume it with what it began with, or start another run"
                ) from error
        trainer.ledger = ledger
        if s.resume is None:
            if run_directory.clear_folder(folder) and s.ledger is None:
                trainer.notes.append(run_directory.REPLACED_NOTE)
            if trainer.checkpoint is not None:
                assert trainer.run_name is not None
                run_directory.write_resume_file(folder, s, trainer.run_name, initial)
        prepare()
        resumes = s.resume is not None and (folder / CHECKPOINT).exists()
        if ranks is not None:
            ranks.from_first(resumes)
        try:
            run = trainer.fit(resume=folder if resumes else None)
        except SystemExit:  # by SIGTERM
            told = f"stopped by SIGTERM; resume with: tacit {s.command} --resume {folder}"
            typer.echo(told, err=True)
            raise
    run.notes += run_directory.no_step_note(run, charged, limit)
    return run, ledger
