"""The hinge regularised by the Kantorovich–Rubinstein loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tacit.losses.hinge import MulticlassHinge
from tacit.losses.kantorovich_rubinstein import KantorovichRubinstein
from tacit.losses.record_loss import LipschitzLoss
from tacit.losses.registry import register_loss
from tacit.losses.shapes import positive
from tacit.losses.task import Task


@register_loss("hinge-kantorovich-rubinstein")
@dataclass(frozen=True)
class HingeKantorovichRubinstein(LipschitzLoss):
    """ℓ = α·`MulticlassHinge(margin)` + `KantorovichRubinstein()`  [Serrurier 2021].

    Where all hinge terms are active, both gradients have the sign −s_k in every coordinate, so
    they add up there and nowhere exceed it:
        (1 + α/K)² + (K − 1)·(1/(K − 1) + α/K)² = K/(K − 1) + 4α/K + α²/K
    is the square of the constant. With one output a record it is 1 + α.
    """

    task: ClassVar[Task | None] = Task.CLASSIFICATION

    alpha: float = 1.0
    margin: float = 1.0

    def __post_init__(self) -> None:
        positive("alpha", self.alpha)
        positive("margin", self.margin)

    def lipschitz_for(self, num_outputs: int) -> float:
        a, k = self.alpha, num_outputs
        return 1 + a if k == 1 else math.sqrt(k / (k - 1) + 4 * a / k + a * a / k)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        hinge = MulticlassHinge(self.margin).per_record(outputs, targets)
        return self.alpha * hinge + KantorovichRubinstein().per_record(outputs, targets)
