"""Cross-entropy with a temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class CrossEntropy:
    """ℓ(h, y) = −log softmax(h/τ)_y, the mean over the records given.

    ∇_h ℓ = (softmax(h/τ) − e_y)/τ for one record. ‖softmax − e_y‖² = (1 − p_y)² + Σ_{k≠y} p_k² ≤
    2(1 − p_y)² ≤ 2, so one record's loss is √2/τ-Lipschitz in its logits.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; give a number above 0")

    @property
    def lipschitz(self) -> float:
        """The largest norm of one record's gradient in its logits."""
        return math.sqrt(2) / self.temperature

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs / self.temperature, targets)
