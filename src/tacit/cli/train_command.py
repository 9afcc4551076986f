"""`tacit train`: from settings to a run in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.cli import launch
from tacit.cli.console import imported_plugins, is_first_rank, print_json
from tacit.cli.schema import command_of, to_dict
from tacit.cli.settings import USUAL_DATASET, TrainSettings
from tacit.errors import UnboundedLayer

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
    if launch.is_unfinished(folder):
        told = f"the run is not complete; resume it with: tacit train --resume {folder}"
        console.print(told, highlight=False, soft_wrap=True)
    _exit_as(facts)


def _exit_as(facts: dict[str, Any]) -> None:
    """A run that Ctrl-C ended is saved, and the command exits as interrupted."""
    if facts["stopped"] == "interrupted":
        raise typer.Exit(130)


def run_training(s: TrainSettings) -> tuple[dict[str, Any], Path]:
    """Train as the settings say; return the facts of the run, and its folder."""
    stem = s.data.stem if s.data else (s.dataset or USUAL_DATASET).replace("/", "-")
    return launch.launched(s, _trained_in, stem)


def _trained_in(folder: Path, s: TrainSettings, mesh: DeviceMesh | None) -> dict[str, Any]:
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
        LedgerRun,
        MovingAverage,
        ProgressBar,
        Sparsification,
    )
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
    initial = launch.initial_seed(folder, s, ranks)
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
        ledger=LedgerRun(name=launch.run_name(folder, s, ranks), prelude=data.releases),
        checkpoint=launch.checkpoint_in(folder, s),
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

    # What can be refused is refused before the ledger admits the run, and leaves no file.
    with build_data.blanks_filled(trainer, data):
        trainer.rehearse()
    preprocessing = data.preprocessing

    def release_and_save_preprocessing() -> None:
        nonlocal preprocessing
        if data.releases and s.resume is not None and (folder / PREPROCESSING).exists():
            preprocessing = build_data.scale_again(trainer, folder, data)
        elif data.releases:
            preprocessing = build_data.release_scaling(trainer, s, data, folder)
        if s.held_out is not None:
            run_directory.write_held_out(s.held_out, data.test.record_ids.tolist())
        preprocessing.save(folder)  # before the first step: what was paid for must survive a kill
        run_directory.delete_release_key(folder)

    run, ledger = launch.fitted(folder, s, trainer, initial, release_and_save_preprocessing)
    with trainer.whole_model():
        if ledger is None:  # on another rank than the first
            return {}
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


train_command = command_of(TrainSettings, train, launch.ended_meanwhile)
