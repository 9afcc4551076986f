"""Per-sample clipping, and what it shares with batch clipping: blocks, constants and the sum."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tacit.checks.side_effects import function_kind, watched_step
from tacit.data.augmentation import Augmentation
from tacit.engines.book_keeping import Automatic, PerRecord
from tacit.engines.clipping import (
    CLIP,
    Clipped,
    ClipRule,
    ClipTask,
    Engine,
    coarsest,
    flattened,
    sum_of_flat,
)
from tacit.engines.model_check import check_model
from tacit.engines.pass_state import from_one_start
from tacit.losses.record_loss import needs_pre_activations
from tacit.losses.tailored import watched
from tacit.precision import ROWS_AT_ONCE, public_rows, slack_of_sum
from tacit.queries.bounded_gradient import (
    Blocks,
    BoundedGradient,
    Loss,
    blocks_from,
    check_cover,
    trainable,
)
from tacit.queries.record_overlap import require_public
from tacit.queries.thresholds import (
    AdaptingQuery,
    AdaptiveNorm,
    Constants,
    Estimates,
    FromPublic,
    LayerFactors,
    LayerwiseNorms,
    RunConstants,
    Thresholds,
    as_max_norms,
)
from tacit.queries.views import ViewBatches
from tacit.records import Records
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import Batch, batch_of
from tacit.sampling.scheme import Unit

MaxNorm = float | AdaptiveNorm | Sequence[float | AdaptiveNorm] | FromPublic


class Frozen(Protocol):
    """Tells which entries of the parameters are still trained: see `Sparsification`."""

    def active(self, model: nn.Module) -> Mapping[str, Tensor]:
        """A public mask of each parameter that has frozen entries."""
        ...


class ClippedQuery(AdaptingQuery, abc.ABC):
    """Σ_units Π_h(g_u): the blocks, constants and bounds of a query that clips.

    A subclass says what a unit is (a record, a mini-set) and has an engine clip it.
    """

    def __init__(
        self,
        max_norm: MaxNorm,
        blocks: Blocks | Callable[[nn.Module], Blocks] | None,
        rule: ClipRule,
        augmentation: Augmentation | None,
        frozen: Frozen | None,
    ) -> None:
        public = isinstance(max_norm, LayerwiseNorms | LayerFactors)
        self.max_norm = max_norm if public else as_max_norms(max_norm)  # type: ignore[arg-type]
        self.blocks = blocks
        self.rule = rule
        self.frozen = frozen
        self._views = ViewBatches(augmentation)

    @property
    def augmentation(self) -> Augmentation | None:
        """The views of a record that its gradient is the mean of."""
        return self._views.augmentation

    @property
    def unit(self) -> Unit:
        """The unit of one clipped contribution: a record, or a mini-set."""
        return Unit.RECORD

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_norm={self.max_norm!r}, rule={self.rule!r})"

    @abc.abstractmethod
    def expected_norms(self, model: nn.Module, loss: Loss, public: Records) -> list[float]:
        """e_h of each block: the mean norm, over public records, of what this query clips."""

    def blocks_of(
        self, model: nn.Module, trained: Mapping[str, nn.Parameter] | None = None
    ) -> Blocks:
        """The names of each block; `trained` are the model's parameters, where they are known."""
        if self.blocks is None:
            return (tuple(trainable(model) if trained is None else trained),)
        blocks = self.blocks(model) if callable(self.blocks) else self.blocks
        check_cover(blocks, model)
        return blocks

    def _task(
        self,
        model: nn.Module,
        loss: Loss,
        blocks: Blocks,
        constants: RunConstants | None = None,
        views: int = 1,
        trained: dict[str, nn.Parameter] | None = None,
    ) -> ClipTask:
        """The task of an engine; without constants, for norms alone."""
        of_step = Constants((1.0,) * len(blocks)) if constants is None else constants.constants
        return ClipTask(
            model,
            loss,
            trainable(model) if trained is None else trained,
            blocks,
            of_step.norms,
            self.rule,
            views,
            counted=constants is not None and bool(constants.adaptive),
            factors=of_step.factors,
            active={} if self.frozen is None else self.frozen.active(model),
        )

    def _bounded(
        self, task: ClipTask, constants: RunConstants, clipped: Iterable[Clipped], divisor: float
    ) -> BoundedGradient:
        """The clipped sums of all pieces, with their bounds and what is released beside them.

        A block's bound is C_h·(1 + s), where s covers the rounding of a sum over so many records
        (`tacit.precision`): 0.2% in float32 and 10⁻¹¹ in float64.
        """
        counted: list[Tensor] = []

        def flat_sums() -> Iterator[Tensor]:
            for piece in from_one_start(clipped, task.model):
                if piece.counts:
                    counted.append(torch.stack(piece.counts))
                yield flattened(piece.sums, task.parameters) if piece.flat is None else piece.flat

        total = sum_of_flat(flat_sums(), task.parameters.values())
        counts = sum(counted, total.new_zeros(len(task.norms)))
        added_in = coarsest({p.dtype for p in task.parameters.values()})
        larger = 1 + slack_of_sum(added_in, public_rows(divisor))
        bounds = [larger * float(norm) for norm in task.norms]
        factors = None if task.factors is None else [float(factor) for factor in task.factors]
        return BoundedGradient(
            blocks=blocks_from(total, task.parameters, task.blocks, bounds, factors, task.active),
            divisor=divisor,
            unit=self.unit,
            statistics=constants.statistics(counts, divisor) if constants.adaptive else (),
            released=constants.released,
        )

    def _constants(
        self, model: nn.Module, loss: Loss, batch: Batch, blocks: Blocks
    ) -> RunConstants:
        """The constants of this run, as they are at this step."""
        constants = self._run_constants
        if isinstance(self.max_norm, LayerwiseNorms | LayerFactors):
            if not isinstance(constants, Estimates):
                constants = self._begin_with(Estimates(self.max_norm))
            public = constants.source.public
            if constants.checked != id(batch.records.inputs):
                require_public(public, batch.records)
                constants.checked = id(batch.records.inputs)
            if constants.due:
                some = public.take(slice(constants.source.records)).to(batch.indices.device).read()
                constants.take(self.expected_norms(model, loss, some))
        else:
            one_each = isinstance(self.max_norm, tuple)
            norms: Any = self.max_norm if one_each else (self.max_norm,) * len(blocks)
            if len(norms) != len(blocks):
                raise ValueError(
                    f"{len(norms)} values of max_norm for {len(blocks)} blocks; give one per block"
                )
            if not isinstance(constants, Thresholds) or not (
                constants.adaptive or constants.given == norms
            ):
                constants = self._begin_with(Thresholds(norms))
        if constants.num_blocks != len(blocks):
            raise ValueError(
                f"this query follows the norms of {constants.num_blocks} blocks, and was given a "
                f"model of {len(blocks)}; make a query for each model"
            )
        return constants


def check_key(task: ClipTask, *more: object) -> Hashable:
    """What a check depends on, apart from the model: the loss, the engine, the parameters."""
    kinds = tuple(map(function_kind, (task.loss, *more)))
    return kinds, tuple(task.parameters), needs_pre_activations(task.loss)


class PerSampleClip(ClippedQuery):
    """Σ_i Π_h(g_i), each record's gradient scaled to norm at most C_h in each block h.

    clip(g) = g·min(1, C/‖g‖)  [Abadi 2016, Alg. 1]. A record adds at most C_h to block h. The
    block's bound is C_h·(1 + s), where s covers the rounding of the sum: 0.2% in float32, 10⁻¹¹ in
    float64. Δ_h is the bound if a record is added or removed, and twice the bound if one is
    replaced. A record whose squared norm is not finite adds nothing.

    Args:
        max_norm: C, a number of at least 1e-12 for every block, or one per block. An `AdaptiveNorm`
            in its place follows a quantile of the norms; `LayerwiseNorms` and `LayerFactors` take
            the constants from a public set, also by a schedule such as `Decaying`.
        rule: how records are scaled (`Clip`, `Normalise`).
        blocks: None clips the whole gradient at once; otherwise a function of the model such as
            `by_layer`, or its value.
        augmentation: views of a record that its gradient is the mean of.
        engine: how the sums are computed; all engines compute the same. `Automatic` (default)
            takes one forward and one backward pass, recorded and compiled where that pays;
            `BookKeeping` does not record; `PerRecord` runs every record alone.
        frozen: which entries are no longer trained (`Sparsification`).

    Any model works in which records stay apart. A pass under shadow memory proves that; a model in
    which they meet is refused with the operator and line.

        bounded = PerSampleClip(max_norm=1.0)(model, loss, batch)
        bounded.sensitivities(Relation.ADD_OR_REMOVE_ONE)
    """

    def __init__(
        self,
        max_norm: MaxNorm,
        *,
        rule: ClipRule = CLIP,
        blocks: Blocks | Callable[[nn.Module], Blocks] | None = None,
        augmentation: Augmentation | None = None,
        engine: Engine | None = None,
        frozen: Frozen | None = None,
    ) -> None:
        super().__init__(max_norm, blocks, rule, augmentation, frozen)
        self.engine: Engine = engine or Automatic()

    def expect(self, steps: int) -> None:
        """Announce how many steps are to come, so that compiling can be decided at once."""
        getattr(self.engine, "expect", lambda steps: None)(steps)

    def forget(self) -> None:
        """Free the memory of recorded steps."""
        getattr(self.engine, "forget", lambda: None)()

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        # The loss may depend on the parameters in any way.
        with watched(model, loss) if needs_pre_activations(loss) else nullcontext():
            trained = trainable(model)
            blocks = self.blocks_of(model, trained)
            constants = self._constants(model, loss, batch, blocks)
            task = self._task(model, loss, blocks, constants, self._views.views, trained)

            def check() -> bool:
                alone = int(isinstance(self.engine, PerRecord))
                return check_model(task, batch, self._views.first, alone=alone)

            plain = self._views.augmentation is None
            replays = plain and type(self.engine) is Automatic and not batch.records.is_lazy
            with watched_step(model, check, check_key(task, self.engine), replays=replays):
                limited = batch.at_most(ROWS_AT_ONCE, task.views)
                pieces = limited.physical() if plain else self._views.of(limited)
                clipped = (self.engine.clipped_sums(task, piece) for piece in pieces)
                return self._bounded(task, constants, clipped, batch.divisor)

    def expected_norms(self, model: nn.Module, loss: Loss, public: Records) -> list[float]:
        task = self._task(model, loss, self.blocks_of(model))
        whole = batch_of(
            public.inputs, public.targets, divisor=1.0, scheme=Poisson(1.0), max_physical=256
        )
        return mean_norms([self.engine.block_norms(task, piece) for piece in whole.physical()])


def mean_norms(norms: list[list[Tensor]]) -> list[float]:
    """The mean of each block's norms over all units of all pieces, ignoring what is not finite.

    Waits for the device once.
    """
    means = []
    for of_block in zip(*norms, strict=True):
        every = torch.cat([n.detach().double().reshape(-1) for n in of_block])
        finite = every.isfinite()
        means.append(torch.where(finite, every, 0.0).sum() / finite.sum())
    return torch.stack(means).tolist()
