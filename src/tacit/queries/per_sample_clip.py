"""Per-sample clipping: every record's gradient is scaled to a norm of at most C."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tacit.batch import Batch, batch_of
from tacit.checks import watched_step
from tacit.data.augmentation import Augmentation
from tacit.data.records import Records
from tacit.engines import Automatic
from tacit.engines.clipping import CLIP, ClipRule
from tacit.engines.task import Engine
from tacit.lipschitz.precision import ROWS_AT_ONCE
from tacit.queries.blocks import Blocks
from tacit.queries.bounded_gradient import BoundedGradient, Loss
from tacit.queries.clipped_query import (
    ClippedQuery,
    Frozen,
    MaxNorm,
    check_key,
    check_records,
    mean_norms,
)
from tacit.queries.looking_inside import looks_inside
from tacit.queries.view_batches import ViewBatches
from tacit.sampling.schemes import Poisson


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
