"""Per-sample clipping: every record's gradient is scaled to a norm of at most C."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from tacit.batch import Batch
from tacit.queries.blocks import Blocks, all_together, check_cover
from tacit.queries.bounded_gradient import Block, BoundedGradient, Loss, trainable
from tacit.queries.clipping import accumulator, as_norms, flattened
from tacit.queries.engines import BookKeeping, Engine, Task
from tacit.queries.record_mixing import refuse_mixing
from tacit.sampling.schemes import Unit


class PerSampleClip:
    """Σ_i Π_h(g_i), each record's gradient scaled to norm at most C_h in each block h.

    clip(g) = g·min(1, C/‖g‖)  [Abadi 2016, Alg. 1]. A record adds at most C_h to block h, so that
    is the block's bound. A record whose squared norm is not finite adds nothing.

    `blocks=None` clips the whole gradient at once; otherwise a function of the model such as
    `by_layer`, or its value. `max_norm` is one constant for every block, or one a block. The
    engines compute the same sums: `BookKeeping` (default) in one forward and one backward pass,
    `PerRecord` by running every record alone through the model.
    """

    unit = Unit.RECORD

    def __init__(
        self,
        max_norm: float | Sequence[float],
        *,
        blocks: Blocks | Callable[[nn.Module], Blocks] | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.max_norm = as_norms(max_norm)
        self.blocks = blocks
        self.engine: Engine = engine or BookKeeping()

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        refuse_mixing(model)
        parameters = trainable(model)
        blocks = self.blocks_of(model)
        norms = self._norm_of_each(blocks)
        task = Task(model, loss, parameters, blocks, norms)
        total = accumulator(parameters.values())
        for piece in batch.physical():
            found = self.engine.clipped_sums(task, piece)
            total += flattened(found, parameters, total.dtype)
        pieces = total.split([p.numel() for p in parameters.values()])
        sums = {n: t.view_as(p) for (n, p), t in zip(parameters.items(), pieces, strict=True)}
        return BoundedGradient(
            blocks=tuple(
                Block(
                    names=names,
                    parameters=tuple(parameters[n] for n in names),
                    sums=tuple(sums[n] for n in names),
                    bound=max_norm,
                )
                for names, max_norm in zip(blocks, norms, strict=True)
            ),
            divisor=batch.divisor,
        )

    def blocks_of(self, model: nn.Module) -> Blocks:
        make = self.blocks or all_together
        blocks = make(model) if callable(make) else make
        check_cover(blocks, model)
        return blocks

    def _norm_of_each(self, blocks: Blocks) -> tuple[float, ...]:
        if isinstance(self.max_norm, float):
            return (self.max_norm,) * len(blocks)
        if len(self.max_norm) != len(blocks):
            raise ValueError(
                f"{len(self.max_norm)} values of max_norm for {len(blocks)} blocks; "
                "give one a block"
            )
        return self.max_norm
