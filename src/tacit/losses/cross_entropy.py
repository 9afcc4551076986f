"""Cross-entropy with a temperature, plain and divided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.losses.record_loss import LipschitzLoss
from tacit.losses.registry import register_loss
from tacit.losses.shapes import positive
from tacit.losses.task import Task


@register_loss("cross-entropy")
@dataclass(frozen=True)
class CrossEntropy(LipschitzLoss):
    """ℓ(h, y) = −Σ_k q_k log softmax(h/τ)_k, q = (1 − s)·e_y + s/K with the smoothing s.

    ∇_h ℓ = (p − q)/τ with p = softmax(h/τ). ‖p − q‖ is convex in p, so it is largest at a corner
    e_k of the simplex. For k = y it is s·√(1 − 1/K). For k ≠ y, p − q = (1 − s)(e_k − e_y) +
    s(e_k − 1/K), whose parts have squared norms 2 and 1 − 1/K and inner product 1:
        ‖p − q‖² = 2(1 − s)² + 2s(1 − s) + s²(1 − 1/K) = 2 − 2s + s²(1 − 1/K),
    which is the larger. So ℓ is √(2 − 2s + s²(1 − 1/K))/τ-Lipschitz in h: √2/τ without smoothing.

    Targets are classes (B,), or probabilities (B, K) in their place: the corners q = e_y are the
    worst of these too. A row that is no distribution would break the constant, so rows are made
    one: what is negative or not finite counts as 0, the rest is divided by its sum.
    Outputs (B, K, …) with a target at each position give the mean over positions, which has a
    smaller constant.
    """

    task: ClassVar[Task | None] = Task.CLASSIFICATION

    temperature: float = 1.0
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        positive("temperature", self.temperature)
        if not 0 <= self.smoothing <= 1:
            raise ValueError(f"smoothing is {self.smoothing}; give a number between 0 and 1")

    @property
    def lipschitz(self) -> float:
        """The constant for any number of classes: K → ∞ above."""
        return math.sqrt(1 + (1 - self.smoothing) ** 2) / self.temperature

    def lipschitz_for(self, num_outputs: int) -> float:
        s = self.smoothing
        return math.sqrt(2 - 2 * s + s * s * (1 - 1 / num_outputs)) / self.temperature

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point() and targets.shape == outputs.shape:
            targets = _distributions(targets.to(outputs.dtype))
        losses = F.cross_entropy(
            outputs / self.temperature, targets, reduction="none", label_smoothing=self.smoothing
        )
        return losses if losses.dim() == 1 else losses.flatten(1).mean(dim=1)


@register_loss("scaled-cross-entropy")
@dataclass(frozen=True)
class ScaledCrossEntropy(LipschitzLoss):
    """τ·CE(h/τ): cross-entropy whose gradient does not grow as the temperature falls.

    The gradient is that of `CrossEntropy(τ)` times τ, so the constant is √2 at every τ (with
    smoothing s, √(2 − 2s + s²(1 − 1/K))). Learning rates carry over from one τ to another; the
    clipless paper's "temperature" of this loss is 1/τ  [Béthune 2024, App. C.1].
    """

    task: ClassVar[Task | None] = Task.CLASSIFICATION

    temperature: float = 1.0
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        assert self._plain

    @property
    def lipschitz(self) -> float:
        """The constant for any number of classes."""
        return CrossEntropy(1.0, self.smoothing).lipschitz

    def lipschitz_for(self, num_outputs: int) -> float:
        return CrossEntropy(1.0, self.smoothing).lipschitz_for(num_outputs)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.temperature * self._plain.per_record(outputs, targets)

    @property
    def _plain(self) -> CrossEntropy:
        return CrossEntropy(self.temperature, self.smoothing)


def _distributions(rows: Tensor) -> Tensor:
    """Rows over classes (axis 1) with no negative number and sum 1; uniform where nothing is left.

    A sum that overflows leaves zeros: no target, no gradient.
    """
    kept = torch.where(rows.isfinite(), rows, 0.0).clamp_min(0)
    total = kept.sum(dim=1, keepdim=True)
    return torch.where(total > 0, kept / total, 1 / rows.shape[1])
