"""Focal loss: cross-entropy that turns away from what is learnt."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.losses.record_loss import LipschitzLoss
from tacit.losses.registry import register_loss
from tacit.losses.shapes import class_scores, is_true_class
from tacit.losses.task import Task


@register_loss("focal")
@dataclass(frozen=True)
class Focal(LipschitzLoss):
    """ℓ(h, y) = −(1 − p)^γ·log p, p = softmax(h)_y.  [Lin 2017; Losing Less, Eq. 6]

    γ = 0 is cross-entropy. With the vector of probabilities P and log p ≤ 0,
        ∇_h ℓ = −φ(p)·(e_y − P),   φ(p) = (1 − p)^γ − γ·p·(1 − p)^(γ−1)·log p ≥ 0,
    and ‖e_y − P‖² = (1 − p)² + Σ_{k≠y} P_k² ≤ 2(1 − p)², with equality where one other class has
    all the rest. So the constant is √2·max_p f(p) with
        f(p) = (1 − p)·φ(p) = (1 − p)^(γ+1) − γ·(1 − p)^γ·p·log p,
    the same for any number of classes from two on. It is √2 for γ = 0, and above that for every
    other γ: 1.6 for γ = 2. `_peak` bounds the maximum from above.
    """

    task: ClassVar[Task | None] = Task.CLASSIFICATION

    gamma: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < math.inf:
            raise ValueError(f"gamma is {self.gamma}; give 0 (cross-entropy) or a number above")

    @property
    def lipschitz(self) -> float:
        """The largest norm of one record's gradient in its outputs."""
        return math.sqrt(2) * _peak(self.gamma)

    def lipschitz_for(self, num_outputs: int) -> float:
        if num_outputs < 2:
            raise ValueError(
                f"Focal takes two outputs a record or more; the model gives {num_outputs}: "
                "end it with one output a class"
            )
        return self.lipschitz

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores_BK = class_scores(outputs, self)
        if scores_BK.shape[1] < 2:
            raise ValueError("Focal takes two outputs a record or more; end with one a class")
        true_BK = is_true_class(scores_BK, targets)
        log_p = torch.where(true_BK, scores_BK.log_softmax(dim=1), 0.0).sum(dim=1)
        # At p = 1 the slope of (1 − p)^γ is infinite for γ < 1, and infinity times 0 is NaN.
        rest = (-log_p.expm1()).clamp_min(torch.finfo(log_p.dtype).tiny)
        return -(rest**self.gamma) * log_p


@functools.cache
def _peak(gamma: float, pieces: int = 20_000) -> float:
    """max f over p in [0, 1], from above.

    On a piece [a, b], (1 − p) is largest at a, and −p·log p has its only peak at 1/e: so
        f(p) ≤ (1 − a)^(γ+1) + γ·(1 − a)^γ·(−c·log c),   c = 1/e brought into [a, b].
    Pieces are shorter towards 0, where f turns for a large γ.
    """
    most = 0.0
    for i in range(pieces):
        a, b = (i / pieces) ** 3, ((i + 1) / pieces) ** 3
        c = min(max(math.exp(-1), a), b)
        entropy = -c * math.log(c)
        most = max(most, (1 - a) ** (gamma + 1) + gamma * (1 - a) ** gamma * entropy)
    return most * (1 + 1e-12)
