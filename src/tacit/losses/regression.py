"""Errors between outputs and targets: absolute, squared, and Huber's between the two.

The `Mean…` losses and `Huber` average over one record's outputs and take real targets. The `Sum…`
losses add up, and take classes as well, coded as one-hot vectors y (one output: 1 where the target
is positive). The squared errors have no Lipschitz constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tacit.losses.classification import class_scores, is_true_class
from tacit.losses.record_loss import LipschitzLoss, RecordLoss, positive
from tacit.losses.registry import Task, register_loss


@register_loss("mean-absolute", task=Task.REGRESSION)
@dataclass(frozen=True)
class MeanAbsoluteError(LipschitzLoss):
    """ℓ(h, y) = (1/K) Σ_k |h_k − y_k| over one record's K outputs.

    The gradient's coordinates are ±1/K (0 where the error is 0), so its norm is at most
    √(K/K²) = 1/√K, and is that wherever no error is 0.
    """

    def lipschitz_for(self, num_outputs: int) -> float:
        return 1 / math.sqrt(num_outputs)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        h_BK, y_BK = _paired(outputs, targets, self)
        return (h_BK - y_BK).abs().mean(dim=1)


@register_loss("huber", task=Task.REGRESSION)
@dataclass(frozen=True)
class Huber(LipschitzLoss):
    """ℓ(h, y) = (1/K) Σ_k H(h_k − y_k), H(e) = e²/2 up to the threshold T, T(|e| − T/2) beyond.

    H′ is e clipped to [−T, T], so each coordinate of the gradient is at most T/K and its norm at
    most T/√K, reached where all errors pass the threshold  [Huber 1964].
    """

    threshold: float = 1.0

    def __post_init__(self) -> None:
        positive("threshold", self.threshold)

    def lipschitz_for(self, num_outputs: int) -> float:
        return self.threshold / math.sqrt(num_outputs)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        h_BK, y_BK = _paired(outputs, targets, self)
        y_BK = y_BK.to(h_BK.dtype)
        return F.huber_loss(h_BK, y_BK, reduction="none", delta=self.threshold).mean(dim=1)


@register_loss("mean-squared", task=Task.REGRESSION)
@dataclass(frozen=True)
class MeanSquaredError(RecordLoss):
    """ℓ(h, y) = (1/K) Σ_k (h_k − y_k)², which has no Lipschitz constant.

    Its gradient 2(h − y)/K grows without end. For the clipless route take `Huber`, or clip the
    loss gradient.
    """

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        h_BK, y_BK = _paired(outputs, targets, self)
        return (h_BK - y_BK).square().mean(dim=1)


class _SumOfErrors(RecordLoss):
    def task_for(self, outputs: Tensor, targets: Tensor) -> Task | None:
        """Real targets are a regression. One output that is trained to be 0 or 1 has no task:
        its sign does not tell the two classes apart."""
        if targets.is_floating_point():
            return Task.REGRESSION
        return Task.CLASSIFICATION if outputs.dim() == 2 and outputs.shape[1] > 1 else None

    def errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """h − y, (B, K)."""
        if targets.is_floating_point():
            h_BK, y_BK = _paired(outputs, targets, self)
        else:
            h_BK = class_scores(outputs, self)
            y_BK = is_true_class(h_BK, targets)
        return h_BK - y_BK.to(h_BK.dtype)


@register_loss("sum-squared")
@dataclass(frozen=True)
class SumSquaredError(_SumOfErrors):
    """ℓ(h, y) = ½‖h − y‖², which has no Lipschitz constant.  [Losing Less, Eq. 5]

    Its gradient h − y grows without end. Per-sample clipping takes it; for the clipless route take
    `SumHuber`, or clip the loss gradient.
    """

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * self.errors(outputs, targets).square().sum(dim=1)


@register_loss("sum-absolute")
@dataclass(frozen=True)
class SumAbsoluteError(_SumOfErrors, LipschitzLoss):
    """ℓ(h, y) = Σ_k |h_k − y_k|.  [Losing Less, Eq. 10]

    Each of the K coordinates of the gradient is ±1 (0 where the error is 0), so its norm is at
    most √K, and is that wherever no error is 0.
    """

    def lipschitz_for(self, num_outputs: int) -> float:
        return math.sqrt(num_outputs)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.errors(outputs, targets).abs().sum(dim=1)


@register_loss("sum-huber")
@dataclass(frozen=True)
class SumHuber(_SumOfErrors, LipschitzLoss):
    """ℓ(h, y) = Σ_k H(h_k − y_k), H(e) = e²/(2β) below β and |e| − β/2 beyond.

    [Losing Less, Eq. 11]. H′ is e/β clipped to [−1, 1], so the gradient's norm is at most √K,
    reached where all errors pass β. `Huber` is the mean over outputs instead, times β.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        positive("beta", self.beta)

    def lipschitz_for(self, num_outputs: int) -> float:
        return math.sqrt(num_outputs)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = self.errors(outputs, targets)
        zeros = errors.new_zeros(()).expand_as(errors)
        return F.smooth_l1_loss(errors, zeros, reduction="none", beta=self.beta).sum(dim=1)


def _paired(outputs: Tensor, targets: Tensor, loss: object) -> tuple[Tensor, Tensor]:
    """Both as (B, K), one target per output. (B,) against (B, 1) would broadcast to B² pairs."""
    num_outputs, num_targets = (math.prod(rows.shape[1:]) for rows in (outputs, targets))
    if num_outputs != num_targets:
        raise ValueError(
            f"{type(loss).__name__} takes one target per output; the model gives {num_outputs} "
            f"outputs per record, and there are {num_targets} targets"
        )
    return outputs.reshape(len(outputs), -1), targets.reshape(len(targets), -1)
