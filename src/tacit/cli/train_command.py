"""`tacit train`: from settings to a run in a folder."""

from __future__ import annotations

import os
import secrets
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.cli.console import (
    imported_plugins,
    is_first_rank,
    join_ranks,
    print_json,
    ranks_started,
)
from tacit.cli.schema import RESUME_FILE, command_of, read_resumed, to_dict
from tacit.cli.settings import USUAL_DATASET, TrainSettings
from tacit.errors import TacitError, UnboundedLayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MEASURED = 64  # training records whose gradient norms --diagnostics records
NOT_PRIVATE = (
    "--diagnostics writes gradient norms of training records to diagnostics.json; they are not "
    "private, so delete the file, and write the page again, before you give the folder to anybody"
)


def train(s: TrainSettings) -> None:
    """Train a model with differential privacy, and save the run in a folder.

    Example: tacit train --dataset mnist --epsilon 3 --delta 1e-5 --out runs/x

    With BatchNorm: tacit train --dataset mnist --model lenet5 --query batch-clip
    --blocks layer --layerwise factors --max-norm 1

    From a file of settings, or as in an earlier run: tacit train --config runs/x/run.json

    Resume a run that was killed: tacit train --resume runs/x

    On several GPUs: torchrun --nproc-per-node 8 -m tacit train --dataset mnist --out runs/x
    """
    facts, folder = run_training(s)
    if not is_first_rank():
        return
    if s.json:
        print_json(facts)
        _exit_as(facts)
        return
    from rich.console import Console

    from tacit.training.run import summary_table

    console = Console()
    console.print(summary_table(facts))
    console.print(f"written to {folder}/", highlight=False, soft_wrap=True)
    if s.held_out is not None:
        told = f"{s.held_out} lists the rows that were held out; it is for you alone"
        console.print(told, highlight=False, soft_wrap=True)
    if (folder / RESUME_FILE).exists():
        told = f"the run is not complete; resume it with: tacit train --resume {folder}"
        console.print(told, highlight=False, soft_wrap=True)
    _exit_as(facts)


def _exit_as(facts: dict[str, Any]) -> None:
    """A run that Ctrl-C ended is saved, and the command exits as interrupted."""
    if facts["stopped"] == "interrupted":
        raise typer.Exit(130)


def run_training(s: TrainSettings) -> tuple[dict[str, Any], Path]:
    """Train as the settings say; return the facts of the run, and its folder."""
    # This imports torch, for which the help must not wait.
    from tacit.cli import run_directory
    from tacit.training.state_file import only_process

    if ranks_started() > 1:
        return _train_on_ranks(s)
    if s.shard and s.resume is None:
        raise ValueError(
            "--shard shares weights out over the ranks that torchrun starts, and this is one "
            "process; leave it out, or start: torchrun --nproc-per-node N -m tacit train ..."
        )
    stem = s.data.stem if s.data else (s.dataset or USUAL_DATASET).replace("/", "-")
    folder = s.out or run_directory.new_folder(stem)
    if s.resume is None:  # and once more when no other process can write there
        run_directory.check_folder(folder, s.overwrite, s.ledger)
    with only_process(folder):
        return _trained_in(folder, s), folder


def ended_meanwhile(folder: Path) -> bool:
    """Whether these ranks were started again after the run's last step, when all was saved."""
    started_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return started_again and (folder / "run.json").exists() and not (folder / RESUME_FILE).exists()


def _train_on_ranks(s: TrainSettings) -> tuple[dict[str, Any], Path]:
    """The same under torchrun, in which the first rank writes the folder and keeps the ledger.

    Ranks that torchrun starts again, since one of them died, go on from the checkpoint.
    """
    import torch.distributed as dist

    from tacit.cli import run_directory
    from tacit.cli.console import device_for
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
        started_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

        def found() -> str:
            if started_again and (folder / RESUME_FILE).exists():
                return "go on"
            if ended_meanwhile(folder):
                return "done"
            if s.resume is None:
                run_directory.check_folder(folder, s.overwrite or started_again, s.ledger)
            return "begin"

        def settings_of(folder: Path) -> dict[str, Any]:
            return read_resumed(TrainSettings, folder, {"resume": folder})

        state = ranks.on_first(found)
        if state == "done":
            return read_facts(folder), folder
        if state == "go on":
            s = TrainSettings(**ranks.on_first(lambda: settings_of(folder)))
        elif started_again:
            s = replace(s, overwrite=True)  # nothing was charged before the settings were written
        with only_process(folder) if ranks.is_first else nullcontext():
            facts = _trained_in(folder, s, mesh)
        dist.barrier()
        return facts, folder
    except RuntimeError as error:
        if not any(word in str(error) for word in ("gloo", "NCCL", "Connection closed by peer")):
            raise
        raise TacitError(
            "another rank has ended, and with it this step: what was charged stays charged, and "
            "nothing else was released; resume the run with: torchrun ... -m tacit train --resume "
            f"{folder}"
        ) from error
    finally:
        dist.destroy_process_group()


def _trained_in(folder: Path, s: TrainSettings, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    from tacit.certificates.accuracy import RADII
    from tacit.cli import build_data, build_model, build_query, run_directory
    from tacit.cli.console import device_for
    from tacit.cli.show_commands import certificate_of
    from tacit.data.preprocessing import FILE as PREPROCESSING
    from tacit.diagnostics import GradientNormHistory
    from tacit.noise import Noise
    from tacit.ranks import Ranks
    from tacit.report.folder_files import write_json
    from tacit.report.run_folder import save_run, target_unit
    from tacit.report.saved_facts import save_diagnostics
    from tacit.training import (
        Callback,
        Checkpoint,
        LedgerRun,
        MovingAverage,
        ProgressBar,
        Sparsification,
    )
    from tacit.training.state_file import CHECKPOINT
    from tacit.training.trainer import Trainer

    # What is asked for: everything that can be refused without reading records.
    dataset = "" if s.data else s.dataset or USUAL_DATASET
    recipe = build_model.recipe_for(dataset, s.query, s.features)
    tailored = build_model.tailored_for(dataset, s.features)
    build_model.require_model(s.model)
    loss_name = s.loss or build_model.USUAL_LOSSES["classification"]
    numbers = build_model.loss_numbers(s, loss_name, recipe, tailored)
    loss = build_model.loss_for(loss_name, numbers, s.query)
    budget = build_query.budget_for(s)
    ranks = None if mesh is None else Ranks(mesh)
    if s.resume is None:
        if ranks is None or ranks.is_first:
            run_directory.check_folder(folder, s.overwrite, s.ledger)
        initial = torch.seed() if s.seed is None else s.seed
    else:
        initial = run_directory.initial_seed(folder)
        if s.checkpoint_every == 0:
            raise ValueError(
                "--checkpoint-every is 0, and a resumed run keeps its checkpoint up to date; leave "
                "it out, or give a number of steps"
            )
    if ranks is not None:
        initial = ranks.from_first(initial)
    device = device_for(s.device)
    torch.manual_seed(initial)

    # Sampler, query, mechanism, ledger, optimizer.
    data = build_data.run_data(s, budget.relation, device)
    recipe = build_model.recipe_of_task(recipe, data.task, s.query)
    if s.loss is None and data.task != "classification":
        loss_name = build_model.USUAL_LOSSES[data.task]
        numbers = build_model.loss_numbers(s, loss_name, recipe, tailored)
        loss = build_model.loss_for(loss_name, numbers, s.query)
    shape = data.private.shape
    num_outputs = build_model.num_outputs_for(loss_name, loss, data.task, data.private)
    plan = build_query.sampling_plan(s, recipe, data.size)
    sampler = build_query.sampler_for(s, plan, data.private, device)
    convert = s.statistics == "convert"
    architecture = build_model.architecture_for(s.model, shape, num_outputs, s.query, convert)
    network, changes = architecture.build()
    for change in changes:
        typer.echo(change, err=True)
    sparsification = Sparsification(s.sparsify) if s.sparsify else None
    query = build_query.query_for(s, recipe, network, loss, data, plan, sparsification)
    statistics = None
    if s.query == "batch-clip":
        statistics = build_query.statistics_for(s, network, data, plan.set_size)
        build_query.check_batch_norm(network, shape, s, plan.set_size)
    network.to(device)
    if mesh is not None:
        if data.releases:
            raise ValueError(
                "on several ranks nothing is released before the first step; declare the ranges "
                "of all columns in --schema, or give --range-noise 0, without --scale-noise and "
                "--category-noise"
            )
        if s.shard:
            fully_shard(network, mesh=mesh)
    optimizer = build_model.optimizer_for(s, network, recipe)
    noise, allocation = build_query.allocation_for(s)
    callbacks: list[Callback] = [] if sparsification is None else [sparsification]
    if not s.quiet and is_first_rank():
        callbacks.append(ProgressBar(target_unit(data.schema)))
    norms = GradientNormHistory(every=max(1, plan.steps // 20), max_records=MEASURED)
    if s.diagnostics:
        typer.echo(f"note: {NOT_PRIVATE}", err=True)
        callbacks.append(norms)
    run_name = s.run_name or f"{folder.name}-{secrets.token_hex(3)}"
    if ranks is not None:
        run_name = ranks.from_first(run_name)
    trainer = Trainer(
        network,
        loss=loss,
        query=query,
        sampler=sampler,
        optimizer=optimizer,
        budget=budget,
        noise=Noise(s.noise_multiplier, allocation),
        scheduler=build_model.scheduler_for(s, recipe, optimizer, plan.steps),
        moving_average=None if s.ema is None else MovingAverage(s.ema),
        statistics=statistics,
        evaluate_on=data.test,
        callbacks=callbacks,
        ledger=LedgerRun(name=run_name, prelude=data.releases),
        checkpoint=None
        if s.checkpoint_every == 0
        else Checkpoint(folder, s.checkpoint_every, s.checkpoint_minutes),
        mesh=mesh,
        seed=s.seed,
    )
    trainer.notes += build_model.change_note(changes)
    trainer.notes += [*data.notes, *run_directory.delta_note(budget.delta, data.size)]
    trainer.config = {
        "settings": to_dict(s),
        "used": {
            "dataset": dataset or str(s.data),
            "rule": s.rule or "clip",
            "blocks_by": s.blocks or "flat",
            "batch_size": plan.batch_size,
            "steps": plan.steps,
            "lr": s.lr or recipe.learning_rate,
            **build_query.clips_for(s, recipe)._asdict(),
            "loss": repr(loss),
            "loss_name": loss_name,
            "loss_numbers": numbers,
            "plugins": imported_plugins(),
            "temperature": getattr(loss, "temperature", None),
            "noise": noise,
            "mini_sets": plan.draw._asdict() if plan.draw else None,
            "public_records": 0 if data.public is None else len(data.public),
            "statistics": None if statistics is None else statistics.note,
            "input_shape": list(shape),
            "num_classes": data.private.num_classes,
            "num_outputs": num_outputs,
            "model": str(network),
            "model_changes": changes,
            "parameters": sum(p.numel() for p in network.parameters()),
        },
    }

    # What can be refused is refused before the ledger admits the run, and leaves no file; and the
    # ledger admits it before an earlier one in the folder is replaced.
    with build_data.blanks_filled(trainer, data):
        trainer.rehearse()
    if ranks is not None and not ranks.is_first:
        trainer.ledger = s.ledger or folder / "ledger.sqlite"  # which the first rank opens
        trainer.fit(resume=folder if ranks.from_first(False) else None)
        with trainer.whole_model():
            return {}
    charged, limit = 0, 0
    file = s.ledger or folder / "ledger.sqlite"
    may_hold_runs = file.exists() or s.ledger is not None
    with run_directory.removed_if_unused(folder, file):
        ledger = run_directory.open_ledger(file, budget)
        if may_hold_runs:
            charged, limit = run_directory.admit_run(ledger, trainer.plan, trainer.run_name, budget)
        trainer.ledger = ledger
        preprocessing = data.preprocessing
        if s.resume is None:
            if run_directory.clear_folder(folder) and s.ledger is None:
                trainer.notes.append(run_directory.REPLACED_NOTE)
            if trainer.checkpoint is not None:
                run_directory.write_resume_file(folder, s, run_name, initial)
        if data.releases and s.resume is not None and (folder / PREPROCESSING).exists():
            preprocessing = build_data.scale_again(trainer, folder, data)
        elif data.releases:
            preprocessing = build_data.release_scaling(trainer, s, data, folder)
        if s.held_out is not None:
            run_directory.write_held_out(s.held_out, data.test.record_ids.tolist())
        preprocessing.save(folder)  # before the first step: what was paid for must survive a kill
        run_directory.delete_release_key(folder)

        resumes = s.resume is not None and (folder / CHECKPOINT).exists()
        if ranks is not None:
            ranks.from_first(resumes)
        try:
            run = trainer.fit(resume=folder if resumes else None)
        except SystemExit:  # by SIGTERM
            typer.echo(f"stopped by SIGTERM; resume with: tacit train --resume {folder}", err=True)
            raise
    with trainer.whole_model():
        run.notes += run_directory.no_step_note(run, charged, limit)
        run.config["used"] |= build_query.query_facts(trainer, sparsification)
        facts = save_run(
            run,
            folder,
            trainer.evaluate_on,
            overwrite=s.resume is not None,  # what was saved when the run was interrupted
            preprocessing=preprocessing,
            schema=data.schema,
            ledger=ledger,
        )
        if s.diagnostics:
            save_diagnostics(folder, norms, max_norm=build_query.whole_norm_for(s, recipe))
        if facts["certificate"] and s.scale_noise is None and s.features == "as-they-are":
            # In units of the pixels themselves, where the data are images.
            try:
                _, facts["certificate"] = certificate_of(folder, RADII, device)
            except UnboundedLayer as error:  # of the scalers before the network
                facts["certificate"] = None
                facts["notes"].append(f"{error} (in units of the pixels, before they are scaled)")
            write_json(facts, folder / "run.json")
    if run.stopped in ("plan complete", "budget"):
        run_directory.remove_unfinished(folder)
    return facts


train_command = command_of(TrainSettings, train, ended_meanwhile)
