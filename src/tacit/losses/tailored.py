"""The loss tailored to DP-SGD, and the penalty on pre-activations that it contains.  [Losing Less]

Squared error learns fast while steps are few, the focal loss later turns to hard records, and the
penalty keeps pre-activations small all along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.losses.classification import Focal
from tacit.losses.pre_activations import mean_squares
from tacit.losses.record_loss import RecordLoss, positive
from tacit.losses.registry import register_loss
from tacit.losses.regression import SumSquaredError
from tacit.losses.task import Task
from tacit.torch_internals import outside_transforms


@dataclass(frozen=True)
class PreActivationPenalty(RecordLoss):
    """ℓ = Σ_{m<M} ‖h^m‖²/d_m, where layer m of M outputs h^m, which has d_m numbers.

    [Losing Less, Eq. 7]. Layers are the convolutions and linear layers of the model, in the order
    in which they are called; the last one called gives the logits and is left out. A layer that is
    called twice counts twice, a frozen one like any other; a model of one layer has no penalty.
    Layers inside an `nn.MultiheadAttention` or a recurrent cell are not called, and do not count.
    What a model runs under `torch.no_grad` counts without a gradient.

    It has no Lipschitz constant: nothing bounds h^m, and its gradient does not pass through the
    outputs. Per-sample clipping bounds it like any other gradient.
    """

    needs_pre_activations: ClassVar[bool] = True

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return mean_squares(outputs, self)


@register_loss("tailored")
class TailoredLoss(RecordLoss):
    """α·focal_γ(h^M, y) + (1 − α)·½‖h^M − y‖² + ((1 − α)/β)·Σ_{m<M} ‖h^m‖²/d_m.

    α = 1/(1 + exp(e_t − e)) at epoch e, with the threshold epoch e_t  [Losing Less, Eq. 8].
    `beta=None` leaves the penalty out and `gamma=0` makes the focal loss cross-entropy.

    The epoch is a public function of the step. `Trainer` sets it before each step, on a fresh copy
    of the loss; in your own loop, call `loss.at(epoch)`. α is kept in a tensor that a recorded
    step reads each time.

    There is no Lipschitz constant. Per-sample and batch clipping take any loss.

        loss = TailoredLoss(threshold_epoch=5, beta=500, gamma=5)
    """

    task: ClassVar[Task | None] = Task.CLASSIFICATION

    def __init__(self, threshold_epoch: float, beta: float | None, gamma: float) -> None:
        if not math.isfinite(threshold_epoch):
            raise ValueError(f"threshold_epoch is {threshold_epoch}; give a finite number")
        if beta is not None:
            positive("beta", beta)
        self.threshold_epoch = threshold_epoch
        self.beta = beta
        self.gamma = gamma
        self._focal = Focal(gamma)
        self._alphas: dict[torch.device, Tensor] = {}
        self.at(0.0)

    def __repr__(self) -> str:
        return f"TailoredLoss({self.threshold_epoch}, beta={self.beta}, gamma={self.gamma})"

    @property
    def needs_pre_activations(self) -> bool:
        return self.beta is not None

    @property
    def epoch(self) -> float:
        return self._epoch

    @property
    def alpha(self) -> float:
        """The focal loss's weight at this epoch."""
        # Not exp(e_t − e), which overflows long before the epoch.
        return 0.5 * (1 + math.tanh(0.5 * (self._epoch - self.threshold_epoch)))

    def at(self, epoch: float) -> None:
        """Make this the loss of that epoch, 0 at the beginning."""
        if not 0 <= epoch < math.inf:
            raise ValueError(f"epoch is {epoch}; give 0 or a number above")
        self._epoch = float(epoch)
        for held in self._alphas.values():
            held.fill_(self.alpha)

    def fresh(self) -> TailoredLoss:
        """The same loss at epoch 0."""
        return TailoredLoss(self.threshold_epoch, self.beta, self.gamma)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        alpha = self._alpha_on(outputs.device)
        easy = SumSquaredError().per_record(outputs, targets)
        if self.beta is not None:
            easy = easy + PreActivationPenalty().per_record(outputs, targets) / self.beta
        return alpha * self._focal.per_record(outputs, targets) + (1 - alpha) * easy

    def _alpha_on(self, device: torch.device) -> Tensor:
        """α where the outputs are: a number from elsewhere would be recorded for good."""
        if device not in self._alphas:
            # Made inside vmap, grad or inference mode it would belong to them, and it must outlive
            # them. In float64, which as a single number leaves the outputs' type as it is.
            with torch.inference_mode(False), outside_transforms():
                self._alphas[device] = torch.tensor(self.alpha, dtype=torch.float64, device=device)
        return self._alphas[device]
