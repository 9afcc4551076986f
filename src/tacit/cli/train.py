"""`tacit train`: a private model from the command line."""

from __future__ import annotations

import enum
import math
import secrets
from pathlib import Path

import torch
import typer
from rich.console import Console

from tacit.budget import Budget
from tacit.certificates.accuracy import RADII
from tacit.cli import accounting_options as options
from tacit.cli import (
    feature_options,
    layerwise_options,
    local_options,
    loss_options,
    mini_set_options,
    public_records,
    statistics_options,
)
from tacit.cli.accounting_options import RelationName, SamplingName
from tacit.cli.certify import certificate_of
from tacit.cli.clip_options import RuleName
from tacit.cli.devices import device_from
from tacit.cli.feature_options import FeaturesName, feature_note, feature_stages, with_features
from tacit.cli.found import found_on_the_way
from tacit.cli.layerwise_options import BlocksName, LayerwiseName, LayerwiseOptions
from tacit.cli.local_options import LocalName, LocalOptions
from tacit.cli.loss_options import LossOptions
from tacit.cli.mini_set_options import MiniSetOptions
from tacit.cli.networks import ModelName, QueryName, network_for, notes_on
from tacit.cli.numbers import check_numbers
from tacit.cli.option_scope import check_scope
from tacit.cli.plugins import imported_plugins
from tacit.cli.queries import EngineName, QueryOptions
from tacit.cli.recipes import recipe_for, tailored_for
from tacit.cli.run_notes import delta_note, no_step_note
from tacit.cli.run_place import (
    KEPT,
    ask_for_room,
    fresh_folder,
    make_room,
    open_ledger,
    require_room,
)
from tacit.cli.samplers import record_sampler
from tacit.cli.scaling import refuse_scaled, scale_privately
from tacit.cli.statistics_options import StatisticsName, StatisticsOptions
from tacit.cli.steppers import (
    NOISE,
    NoiseName,
    OptimizerName,
    ScheduleName,
    optimizer_for,
    scheduler_for,
    usual_noise,
)
from tacit.cli.train_data import (
    DataOptions,
    class_names,
    load_records,
    refuse_row_numbers,
    require_declared_rows,
    scalers_of,
    statistics_event,
)
from tacit.data.preprocessing import Preprocessing
from tacit.noise import Noise
from tacit.report.run_folder import save_run, to_json, write_json
from tacit.sampling.sampler import Sampler
from tacit.training.callbacks import MovingAverage, ProgressBar, Sparsification
from tacit.training.preconditions import LedgerRun
from tacit.training.run import summary_table
from tacit.training.trainer import Trainer


def train(
    dataset: str | None = typer.Option(
        None, show_default="digits", help="A named dataset; `tacit data` lists them."
    ),
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
        None,
        help="Standardise --data, or scattering features, by a mean and std released with this "
        "noise multiplier.",
    ),
    features: FeaturesName = feature_options.FEATURES,
    query: QueryName = typer.Option(QueryName.CLIP, help="How the gradient is bounded."),
    loss: str = loss_options.LOSS,
    temperature: float | None = loss_options.TEMPERATURE,
    threshold_epoch: float | None = loss_options.THRESHOLD_EPOCH,
    beta: float | None = loss_options.BETA,
    gamma: float | None = loss_options.GAMMA,
    gradient_clip: float | None = typer.Option(
        None, help="clipless: limit each record's loss gradient in the outputs; 0 for no limit."
    ),
    max_norm: float | None = typer.Option(
        None, help="clip, batch-clip: the norm C to clip to, or the master constant of blocks."
    ),
    rule: RuleName | None = typer.Option(
        None, show_default="clip", help="How gradients are scaled to it."
    ),
    adaptive_quantile: float | None = typer.Option(
        None, help="Let the clip follow this quantile of the gradients' norms, privately."
    ),
    augment: int | None = typer.Option(
        None, help="Average over so many random crops and flips of each image."
    ),
    blocks: BlocksName | None = typer.Option(
        None, show_default="flat", help="What is clipped together."
    ),
    layerwise: LayerwiseName = layerwise_options.LAYERWISE,
    groups: int | None = layerwise_options.GROUPS,
    master_decay: float | None = layerwise_options.MASTER_DECAY,
    public_share: float | None = public_records.SHARE,
    mini_set_size: int | None = mini_set_options.SIZE,
    mini_sets: int | None = mini_set_options.CHOSEN,
    mini_set_rate: float | None = mini_set_options.RATE,
    local: LocalName | None = local_options.LOCAL,
    local_lr: float | None = local_options.LOCAL_RATE,
    local_batch: int | None = local_options.LOCAL_BATCH,
    statistics: StatisticsName | None = statistics_options.STATISTICS,
    statistics_noise: float | None = statistics_options.NOISE,
    sparsify: int | None = typer.Option(
        None, help="Every so many steps, freeze the weights that hover within the noise."
    ),
    engine: EngineName = typer.Option(
        EngineName.AUTOMATIC,
        help="How the sums are computed; per-record is for clip, set-by-set for batch-clip.",
    ),
    epsilon: float = typer.Option(3.0, help="ε to stay within."),
    delta: float = typer.Option(1e-5, help="δ, well below one over the number of records."),
    relation: RelationName | None = options.RELATION,
    sampling: SamplingName | None = options.SAMPLING,
    batch_size: int | None = typer.Option(
        None, help="Expected number of records in a batch; batch-clip: of all its mini-sets."
    ),
    epochs: float | None = typer.Option(None, help="Passes over the data (in expectation)."),
    steps: int | None = typer.Option(None, help="Number of steps, instead of --epochs."),
    noise_multiplier: float | None = typer.Option(
        None, help="Fix the noise instead of calibrating it; the run ends when the budget does."
    ),
    noise: NoiseName | None = typer.Option(
        None,
        help="How noise is shared over blocks: global by default, and per-layer for several "
        "blocks of batch-clip or of --layerwise.",
    ),
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
    overwrite: bool = typer.Option(
        False, help="Replace the run in --out. Its ledger stays, and is charged for the new run."
    ),
    ledger: Path | None = typer.Option(None, help="A ledger shared with other runs."),
    run_name: str | None = typer.Option(None, help="The run's name in the ledger."),
    as_json: bool = options.JSON,
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress bar."),
) -> None:
    """Train a private classifier and write what happened to a folder.

    Example: tacit train --dataset mnist --query clip --epsilon 3 --delta 1e-5 --batch-size 1024
    --epochs 10 --seed 0 --out runs/x

    BatchNorm: tacit train --dataset mnist --model lenet5 --query batch-clip --mini-set-size 32
    --mini-sets 32 --blocks layer --layerwise factors --max-norm 1 --out runs/y
    """
    given = {name: _plain(value) for name, value in locals().items()}
    check_scope(given, query)
    check_numbers(given)
    dataset, rule, blocks = dataset or "digits", rule or RuleName.CLIP, blocks or BlocksName.FLAT
    given |= {"dataset": dataset, "rule": rule.value, "blocks": blocks.value}
    wanted = LossOptions(loss, temperature, threshold_epoch, beta, gamma)
    wanted.check()
    layers = LayerwiseOptions(blocks, layerwise, groups, master_decay)
    layers.check(max_norm, adaptive_quantile)
    norms = StatisticsOptions(statistics, statistics_noise)
    norms.check()
    folder = out or fresh_folder(data.stem if data else dataset.replace("/", "-"))
    require_room(folder, overwrite, ledger)
    place = device_from(device)
    if sampling is None and query is not QueryName.BATCH_CLIP:
        sampling = SamplingName.POISSON
    budget = Budget(epsilon, delta, options.relation_from(relation, sampling))
    about = DataOptions(
        dataset=dataset,
        file=data,
        target=target,
        test_file=test_data,
        classes=class_names(classes),
        public_size=public_size,
        feature_range=_pair(feature_range),
        unit_norm=unit_norm,
        scale_noise=scale_noise,
        by_channel=features.of_scattering,
    )
    with_public = layers.needs_public or norms.needs_public
    refuse_scaled(about, with_public, statistics is StatisticsName.RELEASED)
    by_id = with_public or query is QueryName.BATCH_CLIP
    refuse_row_numbers(about, budget.relation, by_id)
    torch.manual_seed(seed) if seed is not None else torch.seed()
    loaded = load_records(about)
    standardised = scale_noise is not None
    preprocessing = Preprocessing(
        (*scalers_of(about), *feature_stages(features, loaded[0].shape, standardised))
    )
    records, test_records = with_features(features, *loaded, place, standardised=standardised)
    if by_id:
        require_declared_rows(about, records)
    public, records = public_records.public_and_private(records, public_share, with_public)
    name = dataset if data is None else ""
    recipe = recipe_for(name, query, features)
    size = records.require_public_size("a sampling rate")
    draw = None
    if query is QueryName.BATCH_CLIP:
        asked_sets = MiniSetOptions(mini_set_size, mini_sets, mini_set_rate, batch_size)
        draw = asked_sets.resolve(size, recipe.mini_set_size, recipe.mini_sets)
        expected = draw.records_a_step(size)
    else:
        expected = max(1, min(recipe.batch_size, size // 2)) if batch_size is None else batch_size
    if steps is None:
        steps = max(1, round((recipe.epochs if epochs is None else epochs) * size / expected))
    if draw is not None:
        sampler: Sampler = draw.sampler(records, steps, max_physical_batch, seed)
    else:
        assert sampling is not None
        sampler = record_sampler(
            sampling, records, int(expected), steps, max_physical_batch, place, seed
        )
    network, changes = network_for(model, records, query, norms.converts)
    for change in changes:
        typer.echo(change, err=True)
    asked = QueryOptions(
        query=query,
        max_norm=recipe.max_norm if max_norm is None else max_norm,
        gradient_clip=(recipe.gradient_clip if gradient_clip is None else gradient_clip) or None,
        rule=rule,
        adaptive_quantile=adaptive_quantile,
        augment=augment,
        engine=engine,
        layerwise=layers,
        local=LocalOptions(local, local_lr, local_batch),
        set_size=1 if draw is None else draw.size,
        per_epoch=max(1, round(size / expected)),
    )
    tailored = tailored_for(name, features)
    objective = wanted.build(recipe.temperature, tailored, query)
    sparsification = None if sparsify is None else Sparsification(sparsify)
    bounded = asked.build(network, objective, records.shape, public, sparsification)
    known = None
    if draw is not None:
        known = norms.build(network, public, records, draw.size)
        asked.require_rows_enough(network, records.shape)
    learning_rate = recipe.learning_rate if lr is None else lr
    stepper = optimizer_for(optimizer, network, learning_rate, momentum, recipe.momentum)
    noise = noise or usual_noise(query, layers)
    notes = [*notes_on(changes), *feature_note(features, scale_noise is not None)]
    if layers.needs_public:
        notes.append(public_records.CONSTANTS_NOTE)
    notes += delta_note(delta, size)
    network.to(place)
    bar = [] if quiet else [ProgressBar()]
    trainer = Trainer(
        network,
        loss=objective,
        query=bounded,
        sampler=sampler,
        optimizer=stepper,
        budget=budget,
        noise=Noise(noise_multiplier, NOISE[noise]),
        scheduler=scheduler_for(schedule, recipe, stepper, steps),
        moving_average=MovingAverage(ema) if ema is not None else None,
        statistics=known,
        evaluate_on=test_records,
        callbacks=bar if sparsification is None else [sparsification, *bar],
        ledger=LedgerRun(
            name=run_name or f"{folder.name}-{secrets.token_hex(3)}",
            prelude=statistics_event(about),
        ),
        seed=seed,
    )
    trainer.notes += notes
    trainer.config = {
        "options": given,
        "used": {
            "batch_size": expected,
            "steps": steps,
            "lr": learning_rate,
            "max_norm": None if layerwise is LayerwiseName.ORIGINAL else asked.max_norm,
            "gradient_clip": asked.gradient_clip,
            "loss": repr(objective),
            "loss_name": loss,
            "loss_numbers": wanted.numbers(recipe.temperature, tailored),
            "plugins": imported_plugins(),
            "temperature": getattr(objective, "temperature", None),
            "noise": noise.value,
            "mini_set_size": None if draw is None else draw.size,
            "mini_sets": None if draw is None else draw.chosen,
            "mini_set_rate": None if draw is None else draw.rate,
            "public_records": 0 if public is None else len(public),
            "statistics": None if known is None else known.note,
            "input_shape": list(records.shape),
            "num_classes": records.num_classes,
            "model": str(network),
            "model_changes": changes,
            "parameters": sum(p.numel() for p in network.parameters()),
            "plan": trainer.plan.to_json(),
        },
    }
    before, limit = 0, 0
    file = ledger or folder / "ledger.sqlite"
    shared = file.exists() or ledger is not None
    book = open_ledger(file, budget)
    if shared:
        before, limit = ask_for_room(book, trainer.plan, trainer.run_name, budget)
    if make_room(folder, ledger) and ledger is None:
        trainer.notes.append(KEPT)
    trainer.ledger = book
    if about.scale_noise is not None:
        preprocessing = preprocessing.then(scale_privately(trainer, about, budget, seed))
    preprocessing.save(folder)  # before the first step: what was paid for must survive a kill
    run = trainer.fit()
    run.notes += no_step_note(run, before, limit)
    run.config["used"] |= found_on_the_way(trainer, sparsification)
    facts = save_run(run, folder, trainer.evaluate_on, preprocessing=preprocessing)
    as_given = about.scale_noise is None and features is FeaturesName.AS_THEY_ARE
    if facts["certificate"] and as_given:
        # In units of the pixels themselves, where the data are images.
        _, facts["certificate"] = certificate_of(folder, RADII, place)
        write_json(facts, folder / "run.json")
    if as_json:
        typer.echo(to_json(facts))
        return
    console = Console()
    console.print(summary_table(facts))
    console.print(f"written to {folder}/", highlight=False)


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
