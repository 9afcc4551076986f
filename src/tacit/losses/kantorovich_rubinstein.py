"""The Kantorovich–Rubinstein loss, of one record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.losses.record_loss import LipschitzLoss
from tacit.losses.registry import register_loss
from tacit.losses.shapes import class_scores, is_true_class, signs
from tacit.losses.task import Task


@register_loss("kantorovich-rubinstein")
@dataclass(frozen=True)
class KantorovichRubinstein(LipschitzLoss):
    """ℓ(h, y) = −h_y + Σ_{k≠y} h_k/(K − 1), with all classes taken to be equally likely.

    One against the rest, the distance of class k is E[h_k | y = k] − E[h_k | y ≠ k]
    [Béthune 2024, Eq. 8]. With priors 1/K the mean over k is E[h_y − Σ_{k≠y} h_k/(K − 1)], whose
    negative this is. The gradient is the same everywhere, of norm √(1 + 1/(K − 1)).

    Published code estimates the priors by the classes of the batch. Then the record that is alone
    in its class has a gradient of the order of the batch, and no constant holds. With one output a
    record, ℓ = −s·h with the target's sign s, and the constant is 1.
    """

    task: ClassVar[Task | None] = Task.CLASSIFICATION

    def lipschitz_for(self, num_outputs: int) -> float:
        return math.sqrt(1 + 1 / (num_outputs - 1)) if num_outputs > 1 else 1.0

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores_BK = class_scores(outputs, self)
        share = 1 / max(scores_BK.shape[1] - 1, 1)
        weighted_BK = torch.where(is_true_class(scores_BK, targets), scores_BK, share * scores_BK)
        return -(signs(scores_BK, targets) * weighted_BK).sum(dim=1)
