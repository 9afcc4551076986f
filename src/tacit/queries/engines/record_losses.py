"""The loss of each record on its own, whatever its reduction over records."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from tacit.losses.cross_entropy import CrossEntropy
from tacit.queries.bounded_gradient import Loss


def losses_of(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """ℓ(h_i, y_i) for each record i; a loss that takes a batch is given batches of one.

    Plain cross-entropy, which nearly everyone uses, is asked for its unreduced form instead: the
    same numbers, without the price of `vmap`.
    """
    temperature = _plain_cross_entropy(loss)
    if temperature is not None and outputs.dim() == 2 and targets.dim() == 1:
        return F.cross_entropy(outputs / temperature, targets, reduction="none")

    def of_one(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.unsqueeze(0), target.unsqueeze(0)).sum()

    return vmap(of_one, randomness="different")(outputs, targets)


def _plain_cross_entropy(loss: Loss) -> float | None:
    """The temperature, where the loss is cross-entropy without weights or smoothing."""
    if loss is F.cross_entropy:
        return 1.0
    if type(loss) is CrossEntropy:
        return loss.temperature
    if type(loss) is nn.CrossEntropyLoss:
        plain = loss.weight is None and loss.label_smoothing == 0 and loss.ignore_index == -100
        return 1.0 if plain else None
    return None
