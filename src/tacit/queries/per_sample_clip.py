"""Per-sample clipping: every record's gradient is scaled to a norm of at most C.

Queries that take losses which look inside the network.

Physical batches as an engine takes them: several views of each record, in consecutive rows.

Per-sample clipping: every record's gradient is scaled to a norm of at most C.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from tacit.checks.side_effects import require_isolated_views, watched_step
from tacit.data.augmentation import Augmentation
from tacit.engines.automatic import Automatic
from tacit.engines.clipping import CLIP, ClipRule, Engine
from tacit.engines.draws import State
from tacit.engines.model_certificate import sample_records
from tacit.lipschitz.rounding import ROWS_AT_ONCE
from tacit.losses.pre_activations import watched
from tacit.pytrees import Tree, map_tensors, tensors_of
from tacit.queries.bounded_gradient import Blocks, BoundedGradient, Loss
from tacit.queries.clipped_query import (
    ClippedQuery,
    Frozen,
    MaxNorm,
    check_key,
    check_records,
    mean_norms,
)
from tacit.records import Records
from tacit.sampling.batch import Batch, batch_of
from tacit.sampling.poisson import Poisson

Call = TypeVar("Call", bound=Callable[..., BoundedGradient])


def looks_inside(call: Call) -> Call:
    """A query's `__call__`, with the model watched for the loss's sake.

    For queries that differentiate the loss in the *parameters*, whatever way it depends on them,
    and bound what comes out. One that begins at the gradient in the outputs would miss the rest.
    """

    @functools.wraps(call)
    def query(self: Any, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        with watched(model, loss):
            return call(self, model, loss, batch)

    return cast(Call, query)


class ViewBatches:
    """Cuts a batch into pieces and draws the views of each piece, once.

    Once: were a piece's views drawn again where a record turns out not finite, that record would
    change the others' views. `max_physical` counts rows, K of them per record; a single record's
    views stay together, however many they are.
    """

    def __init__(self, augmentation: Augmentation | None) -> None:
        self.augmentation = augmentation
        self._checked = False

    @property
    def views(self) -> int:
        return 1 if self.augmentation is None else self.augmentation.views

    def first(self, inputs: Tree) -> Tree:
        """One view of each record; without an augmentation, its inputs."""
        if self.augmentation is None:
            return inputs
        return map_tensors(lambda t: t[:: self.views], self.augmentation.views_of(inputs))

    def of(self, batch: Batch) -> Iterator[Batch]:
        if self.augmentation is None:
            yield from batch.physical()
            return
        self._checked = self._checked or self._check(self.augmentation, batch)
        if batch.max_physical is not None:
            batch = replace(batch, max_physical=max(1, batch.max_physical // self.views))
        for piece in batch.physical():
            seen = batch_of(
                self.augmentation.views_of(piece.inputs, piece.record_ids),
                map_tensors(lambda t: t.repeat_interleave(self.views, dim=0), piece.targets),
                divisor=piece.divisor,
                scheme=piece.scheme,
            )
            mask = piece.mask
            yield seen.with_mask(None if mask is None else mask.repeat_interleave(self.views))

    @staticmethod
    def _check(augmentation: Augmentation, batch: Batch) -> bool:
        if augmentation.rows_apart:
            return True
        inputs, _ = sample_records(batch, 256)
        state = State(inputs)

        def views_of(x: Tree) -> Tensor:
            state.restore_draws()
            return torch.cat([t.flatten(1) for t in tensors_of(augmentation.views_of(x))], dim=1)

        try:
            return require_isolated_views(
                augmentation.transform, views_of, inputs, augmentation.views
            )
        finally:
            state.restore_draws()


class PerSampleClip(ClippedQuery):
    """Σ_i Π_h(g_i), each record's gradient scaled to norm at most C_h in each block h.

    clip(g) = g·min(1, C/‖g‖)  [Abadi 2016, Alg. 1]. A record adds at most C_h to block h, so that
    is the block's bound. A record whose squared norm is not finite adds nothing.

    `blocks=None` clips the whole gradient at once; otherwise a function of the model such as
    `by_layer`, or its value. `max_norm` is one constant for every block, or one a block; an
    `AdaptiveNorm` in its place is a constant that follows a quantile, for each block on its own;
    `LayerwiseNorms` and `LayerFactors` take the blocks' constants from a public set. `rule` is how
    records are scaled (`Clip`, `Normalise`), `augmentation` what views of a record its gradient is
    the mean of, `frozen` which entries no longer move.

    Any model will do in which records stay apart: that is proved by a pass under shadow memory,
    and a model in which they meet is refused with the operator and line. The engines compute the
    same sums: `Automatic` (default) in one forward and one backward pass, recorded and compiled
    where that pays; `BookKeeping` without recording; `PerRecord` by running every record alone.
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
        super().__init__(max_norm, blocks, rule, frozen)
        self.engine: Engine = engine or Automatic()
        self._views = ViewBatches(augmentation)

    def expect(self, steps: int) -> None:
        """Announce how many steps are to come, so that compiling can be decided at once."""
        expect = getattr(self.engine, "expect", None)
        if expect is not None:
            expect(steps)

    @looks_inside
    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        blocks = self.blocks_of(model)
        now = self._in_force(model, loss, blocks, batch)
        views, counted = self._views.views, now.counted
        task = self._task(model, loss, blocks, now.constants, views=views, counted=counted)

        def check() -> bool:
            return check_records(task, self.engine, batch, self._views.first)

        with watched_step(model, check, check_key(task, self.engine)):
            pieces = self._views.of(batch.at_most(ROWS_AT_ONCE, self._views.views))
            found = (self.engine.clipped_sums(task, piece) for piece in pieces)
            return self._bounded(task, now, found, batch.divisor)

    def _expected_norms(
        self, model: nn.Module, loss: Loss, blocks: Blocks, public: Records
    ) -> list[float]:
        task = self._task(model, loss, blocks)
        whole = batch_of(
            public.inputs, public.targets, divisor=1.0, scheme=Poisson(1.0), max_physical=256
        )
        return mean_norms([self.engine.block_norms(task, piece) for piece in whole.physical()])
