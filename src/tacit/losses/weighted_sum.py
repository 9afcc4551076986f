"""Sums of losses with weights: a * X + b * Y."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from tacit.losses.pre_activations import needs_pre_activations
from tacit.losses.record_loss import LipschitzLoss, RecordLoss
from tacit.losses.schedule import at_epoch, fresh
from tacit.losses.task import Task


@dataclass(frozen=True)
class WeightedSum(RecordLoss):
    """ℓ = Σ_j w_j·ℓ_j. Made by `weighted_sum`, or by writing a * X + b * Y."""

    parts: tuple[RecordLoss, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.parts or len(self.parts) != len(self.weights):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.parts)} losses; give one a loss, and "
                "at least one loss"
            )
        for weight in self.weights:
            if not math.isfinite(weight):
                raise ValueError(f"a weight is {weight}; give a finite number")

    @property
    def needs_pre_activations(self) -> bool:
        return any(needs_pre_activations(part) for part in self.parts)

    def task_for(self, outputs: Tensor, targets: Tensor) -> Task | None:
        """The task of the parts that declare one; None where they disagree."""
        declared = {part.task_for(outputs, targets) for part in self.parts} - {None}
        return declared.pop() if len(declared) == 1 else None

    def at(self, epoch: float) -> None:
        """Tell the parts that change with the epoch where they are."""
        for part in self.parts:
            at_epoch(part, epoch)

    def fresh(self) -> Self:
        return replace(self, parts=tuple(fresh(part) for part in self.parts))

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        first, *others = (
            weight * part.per_record(outputs, targets)
            for part, weight in zip(self.parts, self.weights, strict=True)
        )
        return sum(others, first)


@dataclass(frozen=True)
class LipschitzSum(WeightedSum, LipschitzLoss):
    """A weighted sum of losses that all have a constant.

    ‖Σ_j w_j·∇ℓ_j‖ ≤ Σ_j |w_j|·L_j, the triangle inequality.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.parts:
            if not isinstance(part, LipschitzLoss):
                raise ValueError(
                    f"{type(part).__name__} has no Lipschitz constant, so the sum has none; use "
                    "WeightedSum"
                )

    def lipschitz_for(self, num_outputs: int) -> float:
        return math.fsum(
            abs(weight) * part.lipschitz_for(num_outputs)
            for part, weight in zip(self.parts, self.weights, strict=True)
            if isinstance(part, LipschitzLoss)
        )


def weighted_sum(terms: Sequence[tuple[float, RecordLoss]]) -> WeightedSum:
    """Σ_j w_j·ℓ_j, which has a constant where all its parts have one; sums inside are opened."""
    parts: list[RecordLoss] = []
    weights: list[float] = []
    for weight, part in terms:
        if isinstance(part, WeightedSum):
            parts += part.parts
            weights += [weight * w for w in part.weights]
        else:
            parts.append(part)
            weights.append(weight)
    bounded = all(isinstance(part, LipschitzLoss) for part in parts)
    return (LipschitzSum if bounded else WeightedSum)(tuple(parts), tuple(weights))
