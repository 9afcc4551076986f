"""`tacit train`: a private model from the command line."""

from __future__ import annotations

import datetime
import enum
import math
import secrets
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from tacit.accounting.ledger import Ledger
from tacit.budget import Budget
from tacit.certificates.accuracy import RADII
from tacit.cli import accounting_options as options
from tacit.cli.accounting_options import RelationName, SamplingName
from tacit.cli.certify import certificate_of
from tacit.cli.clip_options import RuleName
from tacit.cli.networks import ModelName, QueryName, network_for, notes_on
from tacit.cli.queries import BlocksName, EngineName, QueryOptions
from tacit.cli.recipes import Recipe, recipe_for
from tacit.cli.train_data import DataOptions, load_records, standardise, statistics_event
from tacit.data import Records
from tacit.losses import CrossEntropy
from tacit.noise import Allocation, GlobalNoise, OptimisedNoise, PerLayerNoise
from tacit.report import save_run
from tacit.report.run_folder import to_json, write_json
from tacit.report.table import summary_table
from tacit.sampling import FixedSizeSampler, PoissonSampler, Sampler, ShuffleSampler
from tacit.training import MovingAverage, Trainer


class NoiseName(enum.StrEnum):
    GLOBAL = "global"
    PER_LAYER = "per-layer"
    OPTIMISED = "optimised"


class OptimizerName(enum.StrEnum):
    SGD = "sgd"
    ADAM = "adam"


class ScheduleName(enum.StrEnum):
    CONSTANT = "constant"
    COSINE = "cosine"


def train(
    dataset: str = typer.Option("digits", help="A named dataset; `tacit data` lists them."),
    data: Path | None = typer.Option(None, help="A file of your own: .csv, .parquet or .npz."),
    target: str | None = typer.Option(None, help="The column (or array) of --data with classes."),
    test_data: Path | None = typer.Option(None, help="Held-out records; else a share of --data."),
    classes: str | None = typer.Option(None, help="The classes of --data, public: a,b,c"),
    public_size: int | None = typer.Option(None, help="The number of records, declared public."),
    feature_range: str | None = typer.Option(
        None, help="Range of the features of --data, declared public: lower,upper"
    ),
    unit_norm: bool = typer.Option(False, help="Divide each record by its own norm (free)."),
    scale_noise: float | None = typer.Option(
        None, help="Standardise --data by a mean and std released with this noise multiplier."
    ),
    query: QueryName = typer.Option(QueryName.CLIP, help="How the gradient is bounded."),
    temperature: float | None = typer.Option(None, help="Of the cross-entropy loss."),
    gradient_clip: float | None = typer.Option(
        None, help="clipless: limit each record's loss gradient in the outputs; 0 for no limit."
    ),
    max_norm: float | None = typer.Option(None, help="clip: the norm to clip gradients to."),
    rule: RuleName = typer.Option(RuleName.CLIP, help="clip: how gradients are scaled to it."),
    adaptive_quantile: float | None = typer.Option(
        None, help="Let the clip follow this quantile of the gradients' norms, privately."
    ),
    augment: int | None = typer.Option(
        None, help="Average over so many random crops and flips of each image."
    ),
    blocks: BlocksName = typer.Option(BlocksName.FLAT, help="clip: what is clipped together."),
    engine: EngineName = typer.Option(
        EngineName.BOOK_KEEPING, help="How the sums are computed; replay is for GPUs."
    ),
    epsilon: float = typer.Option(3.0, help="ε to stay within."),
    delta: float = typer.Option(1e-5, help="δ, well below one over the number of records."),
    relation: RelationName | None = options.RELATION,
    sampling: SamplingName = options.SAMPLING,
    batch_size: int | None = typer.Option(None, help="Expected number of records in a batch."),
    epochs: float | None = typer.Option(None, help="Passes over the data (in expectation)."),
    steps: int | None = typer.Option(None, help="Number of steps, instead of --epochs."),
    noise_multiplier: float | None = typer.Option(
        None, help="Fix the noise instead of calibrating it; the run ends when the budget does."
    ),
    noise: NoiseName = typer.Option(NoiseName.GLOBAL, help="How noise is shared over blocks."),
    model: ModelName = typer.Option(ModelName.DEFAULT, help="The network to train."),
    optimizer: OptimizerName = typer.Option(OptimizerName.SGD, help="The optimizer."),
    lr: float | None = typer.Option(None, help="The learning rate."),
    momentum: float | None = typer.Option(None, help="sgd: the momentum."),
    schedule: ScheduleName | None = typer.Option(None, help="The learning rate's way."),
    ema: float | None = typer.Option(None, help="Decay of a moving average of the weights."),
    max_physical_batch: int = typer.Option(512, help="Most records to process at once."),
    device: str = typer.Option("auto", help="cpu, cuda, or auto."),
    seed: int | None = typer.Option(None, help="Reproducible, and then not private against it."),
    out: Path | None = typer.Option(None, help="Folder for run.json, weights and plot."),
    overwrite: bool = typer.Option(False, help="Replace the run that is in --out."),
    ledger: Path | None = typer.Option(None, help="A ledger shared with other runs."),
    run_name: str | None = typer.Option(None, help="The run's name in the ledger."),
    as_json: bool = options.JSON,
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress bar."),
) -> None:
    """Train a private classifier and write what happened to a folder.

    Example: tacit train --dataset mnist --query clip --epsilon 3 --delta 1e-5 --batch-size 1024
    --epochs 10 --seed 0 --out runs/x
    """
    given = {name: _plain(value) for name, value in locals().items()}
    folder = out or Path("runs") / f"{data.stem if data else dataset.replace('/', '-')}-{_now()}"
    forgotten = _make_room(folder, overwrite)
    budget = Budget(epsilon, delta, options.relation_from(relation, sampling))
    about = DataOptions(
        dataset=dataset,
        file=data,
        target=target,
        test_file=test_data,
        classes=tuple(classes.split(",")) if classes else (),
        public_size=public_size,
        feature_range=_pair(feature_range),
        unit_norm=unit_norm,
        scale_noise=scale_noise,
    )
    torch.manual_seed(seed) if seed is not None else torch.seed()
    train_records, test_records = load_records(about)
    recipe = recipe_for(dataset if data is None else "", query)
    size = train_records.require_public_size("a sampling rate")
    if batch_size is None:
        batch_size = max(1, min(recipe.batch_size, size // 2))
    if steps is None:
        steps = max(1, round((recipe.epochs if epochs is None else epochs) * size / batch_size))
    place = _device(device)
    sampler = _sampler(sampling, train_records, batch_size, steps, max_physical_batch, place, seed)
    network, changes = network_for(model, train_records, query)
    for change in changes:
        typer.echo(change, err=True)
    learning_rate = recipe.learning_rate if lr is None else lr
    stepper = _optimizer(optimizer, network, learning_rate, momentum, recipe.momentum)
    limit = recipe.gradient_clip if gradient_clip is None else gradient_clip
    asked = QueryOptions(
        query=query,
        max_norm=recipe.max_norm if max_norm is None else max_norm,
        gradient_clip=limit or None,
        rule=rule,
        adaptive_quantile=adaptive_quantile,
        augment=augment,
        blocks=blocks,
        engine=engine,
    )
    loss = CrossEntropy(recipe.temperature if temperature is None else temperature)
    trainer = Trainer(
        network,
        loss=loss,
        query=asked.build(train_records.shape),
        sampler=sampler,
        optimizer=stepper,
        budget=budget,
        noise_multiplier=noise_multiplier,
        allocation=_NOISE[noise],
        scheduler=_scheduler(schedule or _usual_schedule(recipe), stepper, steps),
        moving_average=MovingAverage(ema) if ema is not None else None,
        evaluate_on=test_records,
        progress=not quiet,
        ledger=_open_ledger(ledger, folder, budget),
        run_name=run_name or f"{folder.name}-{secrets.token_hex(3)}",
        prelude=statistics_event(about),
        device=place,
        seed=seed,
        notes=(*notes_on(changes), *((FORGOTTEN,) if forgotten and ledger is None else ())),
    )
    trainer.config = {
        "options": given,
        "used": {
            "batch_size": batch_size,
            "steps": steps,
            "lr": learning_rate,
            "max_norm": asked.max_norm,
            "gradient_clip": asked.gradient_clip,
            "temperature": loss.temperature,
            "model": str(network),
            "model_changes": changes,
            "parameters": sum(p.numel() for p in network.parameters()),
            "plan": trainer.plan.to_json(),
        },
    }
    if about.scale_noise is not None:
        _scale_privately(trainer, about, budget, seed)
    run = trainer.fit()
    if adaptive_quantile is not None:
        run.config["used"]["thresholds"] = getattr(trainer.mechanism.query, "thresholds", ())
    facts = save_run(run, folder, trainer.evaluate_on)
    if facts["certificate"] and about.scale_noise is None:
        # In units of the pixels themselves, where the data are images.
        _, facts["certificate"] = certificate_of(folder, RADII, place)
        write_json(facts, folder / "run.json")
    if as_json:
        typer.echo(to_json(facts))
        return
    console = Console()
    console.print(summary_table(facts))
    console.print(f"written to {folder}/", highlight=False)


def _scale_privately(
    trainer: Trainer, about: DataOptions, budget: Budget, seed: int | None
) -> None:
    """Charge the statistics, and only then compute them."""
    assert isinstance(trainer.ledger, Ledger)
    assert trainer.evaluate_on is not None
    trainer.ledger.begin(trainer.plan, name=trainer.run_name, budget=budget)
    extra = [note for note in trainer.notes if note not in trainer.sampler.records.notes]
    own_seed = None if seed is None else seed + 1  # not the seed of the gradients' noise
    trainer.sampler.records, trainer.evaluate_on = standardise(
        trainer.sampler.records, trainer.evaluate_on, about, budget.relation, own_seed
    )
    trainer.notes = [*trainer.sampler.records.notes, *extra]


def _open_ledger(shared: Path | None, folder: Path, budget: Budget) -> Ledger:
    if shared is None:
        return Ledger(folder / "ledger.sqlite", budget)
    return Ledger(shared) if shared.exists() else Ledger(shared, budget)


FORGOTTEN = (
    "this run replaced an earlier one together with its ledger: what that one spent on the same "
    "data is not counted here; hold several runs to one budget with --ledger"
)


def _make_room(folder: Path, overwrite: bool) -> bool:
    """An empty folder for the run; what is there is replaced only when asked.

    Whether a ledger was among it.
    """
    files = [folder / n for n in ("run.json", "weights.safetensors", "progress.png")]
    files += [folder / f"ledger.sqlite{suffix}" for suffix in ("", "-wal", "-shm")]
    held = [file for file in files if file.exists()]
    if held and not overwrite:
        raise ValueError(f"{folder} holds a run already; give another --out, or --overwrite")
    for file in held:
        file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "ledger.sqlite" in held


def _sampler(
    name: SamplingName,
    records: Records,
    batch: int,
    steps: int,
    physical: int,
    device: torch.device,
    seed: int | None,
) -> Sampler:
    shared: dict[str, Any] = {"max_physical_batch": physical, "seed": seed}
    if name is SamplingName.FIXED_SIZE:
        return FixedSizeSampler(records, batch, steps, **shared)
    if name is SamplingName.SHUFFLE:
        return ShuffleSampler(records, batch, steps, **shared)
    if device.type == "cuda":
        shared["pad_to"] = 32  # few shapes: a new one makes the GPU choose its kernels anew
    return PoissonSampler(records, steps=steps, expected_batch_size=batch, **shared)


def _optimizer(
    name: OptimizerName,
    network: torch.nn.Module,
    lr: float,
    momentum: float | None,
    default_momentum: float,
) -> torch.optim.Optimizer:
    if name is OptimizerName.ADAM:
        return torch.optim.Adam(network.parameters(), lr=lr)
    used = default_momentum if momentum is None else momentum
    return torch.optim.SGD(network.parameters(), lr=lr, momentum=used)


def _usual_schedule(recipe: Recipe) -> ScheduleName:
    return ScheduleName.COSINE if recipe.cosine else ScheduleName.CONSTANT


def _scheduler(
    name: ScheduleName, stepper: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    if name is ScheduleName.CONSTANT:
        return None
    return torch.optim.lr_scheduler.CosineAnnealingLR(stepper, T_max=max(1, steps))


_NOISE: dict[NoiseName, Allocation] = {
    NoiseName.GLOBAL: GlobalNoise(),
    NoiseName.PER_LAYER: PerLayerNoise(),
    NoiseName.OPTIMISED: OptimisedNoise(),
}


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _pair(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--feature-range is {text!r}; give lower,upper such as 0,255") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"--feature-range is {text!r}; lower must be below upper")
    return low, high


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _now() -> str:
    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
