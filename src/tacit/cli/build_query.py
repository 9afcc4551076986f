"""From settings to the sampler, the gradient query, the noise over blocks and the statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from tacit import engines, queries, sampling
from tacit.budget import Budget, Relation
from tacit.cli.accounting_commands import relation_for
from tacit.cli.build_data import RunData
from tacit.cli.build_model import Recipe
from tacit.cli.settings import BatchClippingSettings, ClippingSettings, TrainSettings
from tacit.data.augmentation import Augmentation, RandomCropFlip
from tacit.noise import Allocation, GlobalNoise, OptimisedNoise, PerLayerNoise
from tacit.queries.bounded_gradient import Blocks
from tacit.queries.set_gradients import ignoring_too_small_sets
from tacit.records import Records
from tacit.statistics import (
    PublicStatistics,
    ReleasedStatistics,
    without_running_statistics,
)
from tacit.statistics.tracking import unfrozen_norms
from tacit.training import Sparsification, Trainer


def budget_for(s: TrainSettings) -> Budget:
    """The budget, under the usual relation of the sampling if none is given."""
    mini_sets = s.query == "batch-clip"
    sampling = "mini-sets" if mini_sets else s.sampling or "poisson"
    given = Relation(s.relation) if s.relation else None
    return Budget(s.epsilon, s.delta, relation_for(sampling, given))


class MiniSetDraw(NamedTuple):
    """Sets of `size` records: `chosen` of them a step, or each with probability `rate`."""

    size: int
    chosen: int | None = None
    rate: float | None = None

    def expected_records(self, population: int) -> float:
        """Expected records in a step: s·k, or rate·N."""
        return self.size * self.chosen if self.chosen else (self.rate or 0.0) * population


def mini_sets_for(
    b: BatchClippingSettings, batch_size: int | None, population: int, recipe: Recipe
) -> MiniSetDraw:
    """S and K of a batch of m = S·K records: those given, else what follows, else the recipe's.

    If nothing is said about K, at most half of the sets are drawn.
    """
    m, chosen = batch_size, b.mini_sets
    if b.mini_set_size is not None:
        size = b.mini_set_size
    elif m is not None:
        size = max(1, m // chosen) if chosen else min(recipe.mini_set_size, m)
    else:
        size = min(recipe.mini_set_size, population)
    if size > population:
        raise ValueError(
            f"--mini-set-size is {size}, and there are {population} private records; give smaller "
            "sets"
        )
    if b.mini_set_rate is not None:
        return MiniSetDraw(size, rate=b.mini_set_rate)
    if m is None:
        half = max(1, math.ceil(population / size) // 2)
        return MiniSetDraw(size, chosen or min(recipe.mini_sets, half))
    if size * (chosen or max(1, m // size)) != m:
        sets = f"{chosen} mini-sets of" if chosen else "mini-sets of"
        raise ValueError(
            f"--batch-size is {m}, which is not made of {sets} {size} records; it is "
            "--mini-set-size times --mini-sets: give two of the three"
        )
    return MiniSetDraw(size, m // size)


class SamplingPlan(NamedTuple):
    """How batches are drawn: the expected batch size, the number of steps, and mini-sets if any."""

    batch_size: float
    steps: int
    steps_per_epoch: int
    draw: MiniSetDraw | None

    @property
    def set_size(self) -> int:
        return self.draw.size if self.draw else 1


def sampling_plan(s: TrainSettings, recipe: Recipe, size: int) -> SamplingPlan:
    """The numbers of a sampler over `size` records."""
    draw = None
    if s.query == "batch-clip":
        draw = mini_sets_for(s, s.batch_size, size, recipe)
        expected = draw.expected_records(size)
    else:
        expected = s.batch_size or max(1, min(recipe.batch_size, size // 2))
    steps = s.steps
    if steps is None:
        steps = max(1, round((s.epochs or recipe.epochs) * size / expected))
    return SamplingPlan(expected, steps, max(1, round(size / expected)), draw)


def sampler_for(
    s: TrainSettings, plan: SamplingPlan, records: Records, device: torch.device
) -> sampling.Sampler:
    shared: dict[str, Any] = {"max_physical_batch": s.max_physical_batch, "seed": s.seed}
    if plan.draw is not None:
        size, chosen, rate = plan.draw
        num_sets = math.ceil(records.require_num_ids("a number of mini-sets") / size)
        if chosen is not None and chosen > num_sets:
            raise ValueError(
                f"--mini-sets is {chosen}, and the records make {num_sets} mini-sets of {size}; "
                "give fewer"
            )
        return sampling.MiniSetSampler(
            records, size, plan.steps, chosen=chosen, rate=rate, **shared
        )
    batch = int(plan.batch_size)
    if s.sampling == "fixed-size":
        return sampling.FixedSizeSampler(records, batch, plan.steps, **shared)
    if s.sampling == "shuffle":
        return sampling.ShuffleSampler(records, batch, plan.steps, **shared)
    if device.type == "cuda":
        shared["pad_to"] = 32  # few shapes: a new one makes the GPU choose its kernels anew
    return sampling.PoissonSampler(
        records,
        steps=plan.steps,
        expected_batch_size=batch,
        max_batch_size=s.max_batch_size,
        **shared,
    )


class Clips(NamedTuple):
    """What is clipped to: the norm or master constant; clipless's limit on the loss gradient."""

    max_norm: float | None
    gradient_clip: float | None


def clips_for(s: TrainSettings, recipe: Recipe) -> Clips:
    """The clips that are given, else the recipe's; None for no limit, or for the blocks' norms."""
    master = None if s.layerwise == "original" else s.max_norm or recipe.max_norm
    limit = s.gradient_clip
    return Clips(master, (recipe.gradient_clip if limit is None else limit) or None)


def whole_norm_for(s: TrainSettings, recipe: Recipe) -> float | None:
    """The constant that each record's whole gradient is clipped to; None where there is no such."""
    otherwise = (s.adaptive_quantile, s.augment, s.sparsify)
    if s.query != "clip" or s.blocks not in (None, "flat") or any(otherwise):
        return None
    return clips_for(s, recipe).max_norm


def query_for(
    s: TrainSettings,
    recipe: Recipe,
    model: nn.Module,
    loss: queries.Loss,
    data: RunData,
    plan: SamplingPlan,
    frozen: queries.Frozen | None,
) -> queries.GradientQuery:
    """The gradient query of the route that is asked for."""
    clips = clips_for(s, recipe)
    engine, augmentation = _engine(s), _augmentation(s.augment, data.private.shape)
    quantile = s.adaptive_quantile

    def threshold(first: float | None) -> float | queries.AdaptiveNorm | None:
        return first if quantile is None or first is None else queries.AdaptiveNorm(first, quantile)

    if s.query == "clipless":
        return queries.Clipless(
            gradient_clip=threshold(clips.gradient_clip),
            augmentation=augmentation,
            recorder=engine,
        )
    gradient = _set_gradient(s)
    constants = layerwise_constants(s, data.public, clips.max_norm, plan.steps_per_epoch)
    shared: dict[str, Any] = {
        "max_norm": constants or threshold(clips.max_norm),
        "blocks": blocks_for(s, model, loss, data.public, plan.set_size, gradient),
        "rule": queries.Normalise() if s.rule == "normalise" else queries.Clip(),
        "augmentation": augmentation,
        "frozen": frozen,
    }
    if s.query == "clip":
        return queries.PerSampleClip(engine=engine, **shared)
    return queries.BatchClip(
        mini_set_size=plan.set_size, gradient=gradient, engine=engine, **shared
    )


def layerwise_constants(
    c: ClippingSettings, public: Records | None, master: float | None, per_epoch: int
) -> queries.LayerwiseNorms | queries.LayerFactors | None:
    """Constants of the blocks, estimated anew in each epoch; None for one norm C."""
    if c.layerwise == "none":
        return None
    assert public is not None
    if master is None:
        return queries.LayerwiseNorms(public, every=per_epoch)
    decay = c.master_decay
    schedule = master if decay is None else queries.Decaying(master, decay, per_epoch)
    kind = queries.LayerFactors if c.layerwise == "factors" else queries.LayerwiseNorms
    return kind(public, schedule, every=per_epoch)


def blocks_for(
    c: ClippingSettings,
    model: nn.Module,
    loss: queries.Loss,
    public: Records | None,
    set_size: int,
    gradient: queries.SetGradient | None,
) -> Blocks | Callable[[nn.Module], Blocks] | None:
    """Blocks by name, or groups of them that are fixed here, at the initial weights.

    Groups go by the norms, on public records, of what is clipped: of mini-sets of `set_size`.
    """
    if c.blocks in (None, "flat"):
        return None
    make = queries.by_layer if c.blocks == "layer" else queries.by_parameter
    if c.groups is None:
        return make
    assert public is not None
    some = public.take(slice(max(512, 8 * set_size)))
    probe = queries.BatchClip(1.0, set_size, blocks=make, gradient=gradient)
    return queries.group_by_norm(make(model), probe.expected_norms(model, loss, some), c.groups)


def allocation_for(s: TrainSettings) -> tuple[str, Allocation]:
    """How noise is shared over blocks, by name. Layer factors make one block of all layers."""
    several = s.blocks not in (None, "flat") and s.layerwise != "factors"
    by_block = several and (s.query == "batch-clip" or s.layerwise != "none")
    name = s.noise or ("per-layer" if by_block else "global")
    return name, ALLOCATIONS[name]()


ALLOCATIONS: dict[str, Callable[[], Allocation]] = {
    "global": GlobalNoise,
    "per-layer": PerLayerNoise,
    "optimised": OptimisedNoise,
}


def statistics_for(
    s: TrainSettings, model: nn.Module, data: RunData, set_size: int
) -> PublicStatistics | ReleasedStatistics | None:
    """Where BatchNorm's statistics come from: public records by default, if there are any."""
    wanted, norms = s.statistics, unfrozen_norms(model)
    if wanted == "convert":
        return None
    if not norms:
        if wanted is not None:
            raise ValueError(
                f"--statistics is {wanted}, and this network has no BatchNorm; leave it out"
            )
        return None
    if wanted == "released":
        assert s.statistics_noise is not None
        return ReleasedStatistics(data.private, s.statistics_noise)
    if data.public is None:
        name, norm = next(iter(norms.items()))
        raise ValueError(
            f"layer {name!r} ({type(norm).__name__}) needs statistics to be evaluated with, and "
            "private training keeps none; give --statistics public (a --public-share of the "
            "records is given up), --statistics released (with --statistics-noise), or "
            "--statistics convert (GroupNorm)"
        )
    if len(data.public) < set_size:
        raise ValueError(
            f"{len(data.public)} public records do not fill one mini-set of {set_size}, from which "
            "BatchNorm's statistics are taken; give a larger --public-share, or smaller mini-sets"
        )
    return PublicStatistics(data.public, set_size)


@torch.no_grad()
def check_batch_norm(
    model: nn.Module, shape: tuple[int, ...], b: BatchClippingSettings, set_size: int
) -> None:
    """Raise if BatchNorm cannot normalise what goes through the model together.

    Such a run would release mere noise. The model is tried on zeros, which are nobody's data.
    """
    option, rows = "--mini-set-size", set_size
    if b.local is not None:
        option, rows = "--local-batch", min(b.local_batch or 1, set_size)
    with without_running_statistics(model), ignoring_too_small_sets():
        model(torch.zeros(rows, *shape))
        return
    raise ValueError(
        f"{option} {rows} gives a BatchNorm of this network one value per channel, which has no "
        "variance, so that every gradient would be zero; give at least 2, or --statistics convert"
    )


def query_facts(trainer: Trainer, sparsification: Sparsification | None) -> dict[str, Any]:
    """What the query ended with: thresholds, blocks, their norms, and the share that is frozen.

    All of it is made of what was released, or is public.
    """
    facts: dict[str, Any] = {}
    query = trainer.mechanism.query
    if thresholds := getattr(query, "thresholds", ()):
        facts["thresholds"] = thresholds
    if isinstance(query, queries.ClippedQuery):
        blocks = query.blocks_of(trainer.model)
        facts["num_blocks"] = len(blocks)
        if query.estimates:
            # At the first step, and at the last one for which norms were estimated.
            facts["blocks"] = blocks
            facts["expected_norms"] = [query.estimates[0], query.estimates[-1]]
    if sparsification is not None:
        facts["share_frozen"] = sparsification.share_frozen
    return facts


def _engine(s: TrainSettings) -> Any:
    engines = _ENGINES[s.query]
    if s.engine not in engines:
        raise ValueError(
            f"--engine is {s.engine}, and --query {s.query} has no such engine; give "
            f"--engine {' or '.join(engines)}"
        )
    return engines[s.engine]()


_ENGINES: dict[str, dict[str, Callable[[], Any]]] = {
    "clipless": {
        "automatic": engines.Recorder,
        "book-keeping": lambda: engines.Recorder(capture=False, compile=False),
    },
    "clip": {
        "automatic": engines.Automatic,
        "book-keeping": engines.BookKeeping,
        "per-record": engines.PerRecord,
    },
    "batch-clip": {
        "automatic": lambda: None,  # the certificate chooses
        "book-keeping": lambda: queries.SetsAsRecords(engines.BookKeeping()),
        "set-by-set": queries.SetBySet,
    },
}


def _augmentation(views: int | None, shape: tuple[int, ...]) -> Augmentation | None:
    """Crops shifted by up to an eighth of the image, and mirror images."""
    if views is None:
        return None
    if len(shape) != 3:
        raise ValueError(f"--augment is for images; these records have shape {shape}: leave it out")
    return Augmentation(views, RandomCropFlip(padding=max(1, min(shape[1:]) // 8)))


def _set_gradient(b: BatchClippingSettings) -> queries.SetGradient:
    """What a mini-set proposes: its mean gradient, or a local run over its records."""
    if b.local is None:
        return queries.MeanGradient()
    optimizers: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "momentum": partial(torch.optim.SGD, momentum=0.9),
        "adam": torch.optim.Adam,
    }
    return queries.LocalRun(partial(optimizers[b.local], lr=b.local_lr), at_once=b.local_batch or 1)
