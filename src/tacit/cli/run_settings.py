"""Options that `tacit train` and `tacit finetune` share, each declared once.

A section of either command inherits from the one here, and changes with `overridden` what differs:
a default, or what is said about it.
"""

from __future__ import annotations

from pathlib import Path

from tacit.cli.schema import (
    NOISE,
    ONE_OR_MORE,
    POSITIVE,
    SEED,
    SHARE,
    ZERO_OR_MORE,
    Rule,
    option,
    section,
)


@section("privacy", "Privacy")
class BudgetOptions:
    epsilon: float = option("Privacy budget ε of the run.", 3.0, range=POSITIVE, common=True)
    delta: float = option(
        "Privacy budget δ; choose it well below 1 / number of records.",
        1e-5,
        range=SHARE,
        common=True,
    )
    noise_multiplier: float | None = option(
        "Noise multiplier. The run stops before a step that would exceed the budget.",
        usual="calibrated to the budget",
        range=NOISE,
    )


@section("training", "Training")
class StepOptions:
    batch_size: int | None = option(
        "Expected number of records in a batch.", range=ONE_OR_MORE, common=True
    )
    epochs: float | None = option("Expected passes over the data.", range=POSITIVE, common=True)
    steps: int | None = option(
        "Number of steps, instead of --epochs.",
        range=ZERO_OR_MORE,
        not_with=Rule("epochs", (), "and each of them follows from the other"),
    )
    lr: float | None = option("Learning rate.", range=POSITIVE)
    device: str = option("Device to train on: cpu, cuda or auto.", "auto", with_resume=True)
    shard: bool = option(
        "Under torchrun: keep weights, gradients and the optimizer's state in parts, one per rank.",
        False,
        with_resume=True,
    )
    seed: int | None = option(
        "Random seed. Anyone who knows it can remove the noise; do not use it for a release.",
        range=SEED,
    )


@section("output", "Output")
class FolderOptions:
    out: Path | None = option(
        "Folder for run.json, weights, plot and ledger.", usual="runs/NAME-TIME", common=True
    )
    overwrite: bool = option(
        "Replace the run in --out. Its ledger stays, and is charged for the new run too.", False
    )
    ledger: Path | None = option(
        "Ledger to charge; runs over the same records can share one.",
        usual="ledger.sqlite in --out",
    )
    run_name: str | None = option("Name of the run in the ledger.")
    resume: Path | None = option(
        "Folder of a killed or interrupted run to resume. It keeps its settings: give nothing "
        "beside it that changes them.",
    )
    checkpoint_every: int | None = option(
        "Steps between checkpoints, 0 for none. A kill loses what was charged after the last one.",
        usual="each percent of the run",
        range=ZERO_OR_MORE,
        with_resume=True,
    )
    checkpoint_minutes: float | None = option(
        "Minutes between checkpoints.",
        range=POSITIVE,
        not_with=Rule("checkpoint_every", (0,), "which writes none"),
        with_resume=True,
    )
    json: bool = option("Print one JSON object and nothing else.", False, with_resume=True)
    quiet: bool = option("Show no progress bar.", False, short="-q", with_resume=True)
