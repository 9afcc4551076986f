"""Losses of real-valued targets: absolute error, Huber's, and squared error without a constant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tacit.losses.record_loss import LipschitzLoss, RecordLoss
from tacit.losses.registry import register_loss
from tacit.losses.shapes import paired, positive
from tacit.losses.task import Task


@register_loss("mean-absolute")
@dataclass(frozen=True)
class MeanAbsoluteError(LipschitzLoss):
    """ℓ(h, y) = (1/K) Σ_k |h_k − y_k| over one record's K outputs.

    The gradient's coordinates are ±1/K (0 where the error is 0), so its norm is at most
    √(K/K²) = 1/√K, and is that wherever no error is 0.
    """

    task: ClassVar[Task | None] = Task.REGRESSION

    def lipschitz_for(self, num_outputs: int) -> float:
        return 1 / math.sqrt(num_outputs)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        h_BK, y_BK = paired(outputs, targets, self)
        return (h_BK - y_BK).abs().mean(dim=1)


@register_loss("huber")
@dataclass(frozen=True)
class Huber(LipschitzLoss):
    """ℓ(h, y) = (1/K) Σ_k H(h_k − y_k), H(e) = e²/2 up to the threshold T, T(|e| − T/2) beyond.

    H′ is e clipped to [−T, T], so each coordinate of the gradient is at most T/K and its norm at
    most T/√K, reached where all errors pass the threshold  [Huber 1964].
    """

    task: ClassVar[Task | None] = Task.REGRESSION

    threshold: float = 1.0

    def __post_init__(self) -> None:
        positive("threshold", self.threshold)

    def lipschitz_for(self, num_outputs: int) -> float:
        return self.threshold / math.sqrt(num_outputs)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        h_BK, y_BK = paired(outputs, targets, self)
        y_BK = y_BK.to(h_BK.dtype)
        return F.huber_loss(h_BK, y_BK, reduction="none", delta=self.threshold).mean(dim=1)


@register_loss("mean-squared")
@dataclass(frozen=True)
class MeanSquaredError(RecordLoss):
    """ℓ(h, y) = (1/K) Σ_k (h_k − y_k)², which has no Lipschitz constant.

    Its gradient 2(h − y)/K grows without end. For the clipless route take `Huber`, or clip the
    loss gradient.
    """

    task: ClassVar[Task | None] = Task.REGRESSION

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        h_BK, y_BK = paired(outputs, targets, self)
        return (h_BK - y_BK).square().mean(dim=1)
