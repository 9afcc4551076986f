"""Cross-entropy of one record's tokens, divided by their own number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tacit.losses.record_loss import LipschitzLoss
from tacit.losses.registry import register_loss
from tacit.losses.task import Task


@register_loss("token-cross-entropy")
@dataclass(frozen=True)
class TokenCrossEntropy(LipschitzLoss):
    """ℓ(h, y) = (1/n) Σ_t −Σ_k q_tk log softmax(h_t)_k over the n tokens t with y_t ≠ ignore_index.

    Outputs are (records, tokens, vocabulary) and targets (records, tokens). q_t is e_{y_t}, with
    the smoothing s (1 − s)·e_{y_t} + s/V. A record without a token has loss 0. `shift=True` is for
    causal language models, whose output at t predicts token t + 1: h_t is compared with y_{t+1}.

    n is the record's own count, so that records stay apart. The usual mean over all tokens of a
    batch divides by a number that depends on every record: one long text would change everyone's
    gradient.

    ‖∇_h ℓ‖ ≤ √n·(c/n) ≤ c, where c = √(1 + (1 − s)²) bounds each token's gradient
    (`CrossEntropy`), reached with n = 1.

        loss = TokenCrossEntropy(shift=True)   # with Records({"input_ids": ids}, targets=ids)
    """

    task: ClassVar[Task | None] = Task.TOKENS

    ignore_index: int = -100
    shift: bool = False
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}; give a number between 0 and 1"
            )

    @property
    def lipschitz(self) -> float:
        """The constant for any number of tokens and any vocabulary."""
        return math.sqrt(1 + (1 - self.label_smoothing) ** 2)

    def lipschitz_for(self, num_outputs: int) -> float:
        return self.lipschitz

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.dim() != 3 or targets.shape != outputs.shape[:2]:
            raise ValueError(
                "TokenCrossEntropy takes outputs of shape (records, tokens, vocabulary) and "
                f"targets of shape (records, tokens); these are {tuple(outputs.shape)} and "
                f"{tuple(targets.shape)}"
            )
        targets = self.aligned(targets)
        each = F.cross_entropy(
            outputs.flatten(0, 1),
            targets.flatten(),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )
        count_B = (targets != self.ignore_index).sum(dim=1)
        return each.view(targets.shape).sum(dim=1) / count_B.clamp_min(1)

    def aligned(self, targets: Tensor) -> Tensor:
        """The target of each position's output: with `shift`, the next token, and none at last."""
        if not self.shift:
            return targets
        # Shorter targets would ask for a copy of the outputs, which are far larger.
        return F.pad(targets[:, 1:], (0, 1), value=self.ignore_index)
