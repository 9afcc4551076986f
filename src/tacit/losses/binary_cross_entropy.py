"""Binary cross-entropy of one output, plain and divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tacit.losses.record_loss import LipschitzLoss
from tacit.losses.registry import register_loss
from tacit.losses.shapes import one_number, positive, signs
from tacit.losses.task import Task


@register_loss("binary-cross-entropy")
@dataclass(frozen=True)
class BinaryCrossEntropy(LipschitzLoss):
    """ℓ(h, y) = log(1 + exp(−s·h/τ)), s = +1 where the target is positive and −1 elsewhere.

    So targets may be 0/1 or −1/+1. |∂ℓ/∂h| = σ(−s·h/τ)/τ < 1/τ, and 1/τ is approached.
    """

    task: ClassVar[Task | None] = Task.BINARY

    temperature: float = 1.0

    def __post_init__(self) -> None:
        positive("temperature", self.temperature)

    @property
    def lipschitz(self) -> float:
        """The largest norm of one record's gradient in its output."""
        return 1 / self.temperature

    def lipschitz_for(self, num_outputs: int) -> float:
        _refuse_classes(num_outputs, self)
        return self.lipschitz

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        h_B = one_number(outputs, self)
        signs_B = signs(h_B.unsqueeze(1), targets).squeeze(1)
        return F.softplus(-signs_B * h_B / self.temperature)


@register_loss("scaled-binary-cross-entropy")
@dataclass(frozen=True)
class ScaledBinaryCrossEntropy(LipschitzLoss):
    """τ·BCE(h/τ): the gradient of `BinaryCrossEntropy(τ)` times τ, so the constant is 1."""

    task: ClassVar[Task | None] = Task.BINARY

    temperature: float = 1.0

    def __post_init__(self) -> None:
        positive("temperature", self.temperature)

    @property
    def lipschitz(self) -> float:
        """The largest norm of one record's gradient in its output."""
        return 1.0

    def lipschitz_for(self, num_outputs: int) -> float:
        _refuse_classes(num_outputs, self)
        return 1.0

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        plain = BinaryCrossEntropy(self.temperature)
        return self.temperature * plain.per_record(outputs, targets)


def _refuse_classes(num_outputs: int, loss: object) -> None:
    if num_outputs != 1:
        raise ValueError(
            f"{type(loss).__name__} takes one output a record; the model gives {num_outputs}: "
            "end it with one output, or use CrossEntropy"
        )
