"""The mean square of the pre-activations, as a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tacit.losses.pre_activations import mean_squares
from tacit.losses.record_loss import RecordLoss


@dataclass(frozen=True)
class PreActivationPenalty(RecordLoss):
    """ℓ = Σ_{m<M} ‖h^m‖²/d_m, h^m what layer m of M gives and d_m how many numbers that is.

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
