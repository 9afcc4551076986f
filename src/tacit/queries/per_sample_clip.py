"""Per-sample clipping: every record's gradient is scaled to a norm of at most C."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tacit.batch import Batch
from tacit.data.augmentation import Augmentation
from tacit.queries.adaptive_norm import Following, MaxNorm, Thresholds, as_max_norms
from tacit.queries.blocks import Blocks, all_together, check_cover
from tacit.queries.bounded_gradient import BoundedGradient, Loss, blocks_from, trainable
from tacit.queries.clip_rules import CLIP, ClipRule
from tacit.queries.clipping import accumulator, flattened
from tacit.queries.engines import BookKeeping, Engine, Task
from tacit.queries.record_mixing import refuse_mixing
from tacit.queries.view_batches import ViewBatches
from tacit.sampling.schemes import Unit


class PerSampleClip(Following):
    """Σ_i Π_h(g_i), each record's gradient scaled to norm at most C_h in each block h.

    clip(g) = g·min(1, C/‖g‖)  [Abadi 2016, Alg. 1]. A record adds at most C_h to block h, so that
    is the block's bound. A record whose squared norm is not finite adds nothing.

    `blocks=None` clips the whole gradient at once; otherwise a function of the model such as
    `by_layer`, or its value. `max_norm` is one constant for every block, or one a block; an
    `AdaptiveNorm` in its place is a constant that follows a quantile, for each block on its own.
    `rule` is how records are scaled (`Clip`, `Normalise`), `augmentation` what views of a record
    its gradient is the mean of. The engines compute the same sums: `BookKeeping` (default) in one
    forward and one backward pass, `PerRecord` by running every record alone through the model.
    """

    unit = Unit.RECORD

    def __init__(
        self,
        max_norm: MaxNorm,
        *,
        rule: ClipRule = CLIP,
        blocks: Blocks | Callable[[nn.Module], Blocks] | None = None,
        augmentation: Augmentation | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.max_norm = as_max_norms(max_norm)
        self.rule = rule
        self.blocks = blocks
        self.engine: Engine = engine or BookKeeping()
        self._views = ViewBatches(augmentation)

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        refuse_mixing(model)
        parameters = trainable(model)
        blocks = self.blocks_of(model)
        thresholds = self._thresholds_of(blocks)
        norms, adaptive = thresholds.norms, thresholds.adaptive
        task = Task(
            model, loss, parameters, blocks, norms, self.rule, self._views.views, bool(adaptive)
        )
        total = accumulator(parameters.values())
        counts = total.new_zeros(len(blocks))
        for piece in self._views.of(batch):
            found = self.engine.clipped_sums(task, piece)
            total += flattened(found.sums, parameters, total.dtype)
            if found.counts:
                counts += torch.stack(found.counts)
        return BoundedGradient(
            blocks=blocks_from(total, parameters, blocks, norms),
            divisor=batch.divisor,
            statistics=thresholds.statistics(counts, batch.divisor),
        )

    def blocks_of(self, model: nn.Module) -> Blocks:
        make = self.blocks or all_together
        blocks = make(model) if callable(make) else make
        check_cover(blocks, model)
        return blocks

    def _thresholds_of(self, blocks: Blocks) -> Thresholds:
        """The thresholds in force: new ones for constants, the run's own where some adapt."""
        each = self.max_norm
        asked = each if isinstance(each, tuple) else (each,) * len(blocks)
        if len(asked) != len(blocks):
            raise ValueError(
                f"{len(asked)} values of max_norm for {len(blocks)} blocks; give one a block"
            )
        new = Thresholds(asked)
        if not new.adaptive:
            return new
        held = self._thresholds = self._thresholds or new
        if len(held.asked) != len(blocks):
            raise ValueError(
                f"this query follows the norms of {len(held.asked)} blocks, and was given a model "
                f"of {len(blocks)}; make a query for each model"
            )
        return held
