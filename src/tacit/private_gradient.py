"""A gradient that is private as soon as it exists, together with what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from tacit.errors import PlanChanged
from tacit.noise import NoiseSource
from tacit.queries.bounded_gradient import BoundedGradient, Statistic

if TYPE_CHECKING:
    from tacit.accounting.plan import Plan
    from tacit.batch import Batch


class PrivateGradient:
    """(Σ gradients + N(0, s_h²)) / divisor, drawn once, when the ledger has charged for it.

    The noise is not drawn before the charge is on disk, so a process killed at any moment has
    never drawn more steps than it was charged for. There is no way to read the sum without it,
    nor a statistic beside it: those go, noisy, to whoever asked for them.
    """

    def __init__(
        self,
        plan: Plan,
        bounded: BoundedGradient,
        stds: Sequence[float],
        noise: NoiseSource,
        batch: Batch | None = None,
    ) -> None:
        self.plan = plan
        self.drawn = None if batch is None else batch.drawn
        # Only within a shuffled epoch, and only for a sampler's own draw, are steps one event.
        whole_epochs = plan.scheme.steps_within(1) > 1 and self.drawn is not None
        self.occasion = batch.occasion if batch is not None and whole_epochs else None
        self.stds = tuple(stds)
        self.divisor = bounded.divisor
        self._bounded: BoundedGradient | None = bounded
        self._noise = noise

    def uncovered(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of `model` that this gradient is not for; an error if it fits not at all.

        For the ledger to ask before it charges.
        """
        if self._bounded is None:
            raise RuntimeError("this gradient was released already; noise is drawn once")
        if self.drawn is not None and self.drawn.released:
            raise PlanChanged(
                "a gradient of this batch was released already, and a second one would be charged "
                "as another draw, which it is not; take the next batch of the sampler"
            )
        own = {id(p): p for p in model.parameters()}
        for block in self._bounded.blocks:
            for parameter in block.parameters:
                if own.pop(id(parameter), None) is None:
                    raise ValueError("the gradient is for another model than the one in `into`")
        return list(own.values())

    def draw_into(self, model: nn.Module) -> None:
        """Draw the noise and set `.grad`. For the ledger alone: nobody else has charged."""
        for parameter in self.uncovered(model):
            parameter.grad = None  # a gradient from elsewhere would be one that nobody paid for
        if self.drawn is not None:
            self.drawn.released = True
        bounded, self._bounded = self._bounded, None
        assert bounded is not None
        for block, std in zip(bounded.blocks, self.stds, strict=True):
            total = torch.cat([part.reshape(-1) for part in block.sums])
            drawn = self._noise.normal(total.numel(), total.device, total.dtype)
            total.add_(drawn, alpha=std).div_(bounded.divisor)
            pieces = total.split([p.numel() for p in block.parameters])
            for parameter, piece in zip(block.parameters, pieces, strict=True):
                parameter.grad = piece.view(parameter.shape).to(parameter.dtype)
        if bounded.statistics:
            self._release_statistics(bounded.statistics)

    def _release_statistics(self, statistics: Sequence[Statistic]) -> None:
        values = torch.stack([statistic.value for statistic in statistics])
        drawn = self._noise.normal(len(values), values.device, values.dtype)
        for row, statistic in enumerate(statistics):
            values[row] += statistic.std * drawn[row]
        # The one place that waits for the device: thresholds are plain numbers.
        for statistic, noisy in zip(statistics, values.tolist(), strict=True):
            statistic.observe(noisy)
