"""A gradient that is private as soon as it exists, together with what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tacit.errors import PlanChanged
from tacit.noise import NoiseSource
from tacit.queries.bounded_gradient import BoundedGradient, Statistic

if TYPE_CHECKING:
    from tacit.accounting.plan import Plan
    from tacit.batch import Batch


# A parameter, its sum, the noise's deviation, the factor to divide out, and the entries to keep.
_Part = tuple[nn.Parameter, Tensor, float, float, Tensor | None]


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
        self._release_blocks(bounded)
        if bounded.statistics:
            self._release_statistics(bounded.statistics)
        for released in bounded.released:
            released()

    def _release_blocks(self, bounded: BoundedGradient) -> None:
        """Noise for all parameters in one draw: a GPU is given few things to do, not hundreds."""
        every = [
            (parameter, part, std, factor, mask)
            for block, std in zip(bounded.blocks, self.stds, strict=True)
            for parameter, part, factor, mask in zip(
                block.parameters,
                block.sums,
                block.factors or (1.0,) * len(block.sums),
                block.active or (None,) * len(block.sums),
                strict=True,
            )
        ]
        for alike in _by_kind(every):
            parameters, sums, stds, factors, masks = zip(*alike, strict=True)
            sizes = [part.numel() for part in sums]
            drawn = self._noise.normal(sum(sizes), sums[0].device, sums[0].dtype)
            pieces = list(drawn.split(sizes))
            torch._foreach_mul_(pieces, list(stds))
            torch._foreach_add_(pieces, [part.reshape(-1) for part in sums])
            torch._foreach_div_(pieces, [bounded.divisor * factor for factor in factors])
            grads = drawn.to(parameters[0].dtype).split(sizes)  # the pieces are views of `drawn`
            for parameter, grad, mask in zip(parameters, grads, masks, strict=True):
                shaped = grad.view(parameter.shape)
                parameter.grad = shaped if mask is None else torch.where(mask, shaped, 0.0)

    def _release_statistics(self, statistics: Sequence[Statistic]) -> None:
        values = torch.stack([statistic.value for statistic in statistics])
        drawn = self._noise.normal(len(values), values.device, values.dtype)
        for row, statistic in enumerate(statistics):
            values[row] += statistic.std * drawn[row]
        # The one place that waits for the device: thresholds are plain numbers.
        for statistic, noisy in zip(statistics, values.tolist(), strict=True):
            statistic.observe(noisy)


def _by_kind(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Parts whose sums and parameters have one device and one precision each, together."""
    kinds: dict[object, list[_Part]] = {}
    for part in parts:
        parameter, total = part[0], part[1]
        key = (total.device, total.dtype, parameter.dtype)
        kinds.setdefault(key, []).append(part)
    return list(kinds.values())
