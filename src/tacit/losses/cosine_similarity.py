"""The cosine between the outputs and the true class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.losses.record_loss import LipschitzLoss
from tacit.losses.registry import register_loss
from tacit.losses.shapes import class_scores, is_true_class, positive
from tacit.losses.task import Task


@register_loss("cosine-similarity")
@dataclass(frozen=True)
class CosineSimilarity(LipschitzLoss):
    """ℓ(h, y) = −h_y / max(F, ‖h‖), with a floor F below which outputs count as they are.

    Below the floor the gradient is −e_y/F. Above it, with the unit vector u = h/‖h‖, it is
    −(e_y − u_y·u)/‖h‖, a projection of e_y divided by ‖h‖ ≥ F. So the constant is 1/F, reached
    below the floor; without a floor there is none  [Béthune 2024, App. C.1].
    """

    task: ClassVar[Task | None] = Task.CLASSIFICATION

    floor: float = 1.0

    def __post_init__(self) -> None:
        positive("floor", self.floor)

    @property
    def lipschitz(self) -> float:
        """The largest norm of one record's gradient in its outputs."""
        return 1 / self.floor

    def lipschitz_for(self, num_outputs: int) -> float:
        return self.lipschitz

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores_BK = class_scores(outputs, self)
        if scores_BK.shape[1] < 2:
            raise ValueError("CosineSimilarity takes two outputs a record or more; a sign has none")
        true_B = torch.where(is_true_class(scores_BK, targets), scores_BK, 0).sum(dim=1)
        norms_B = torch.linalg.vector_norm(scores_BK, dim=1)
        return -true_B / norms_B.clamp_min(self.floor)
