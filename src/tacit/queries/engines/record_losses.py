"""The loss of each record on its own, whatever its reduction over records."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from tacit import losses
from tacit.losses import LipschitzSum, RecordLoss, WeightedSum, WithConstant
from tacit.queries.bounded_gradient import Loss


def losses_of(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """ℓ(h_i, y_i) for each record i; a loss that takes a batch is given batches of one.

    Tacit's own losses and plain cross-entropy, which nearly everyone uses, are asked for their
    unreduced form instead: the same numbers, without the price of `vmap`. By exact type, since a
    subclass may let records meet.
    """
    if type(loss) is WithConstant:
        return losses_of(loss.loss, outputs, targets)  # type: ignore[arg-type]
    if type(loss) in _SUMS:
        assert isinstance(loss, WeightedSum)
        # Each part by its own right: one of them may be a user's.
        each = (losses_of(part, outputs, targets) for part in loss.parts)
        return torch.stack([w * l_B for w, l_B in zip(loss.weights, each, strict=True)]).sum(dim=0)
    if type(loss) in _OURS:
        assert isinstance(loss, RecordLoss)
        return loss.per_record(outputs, targets)
    if _is_plain_cross_entropy(loss) and outputs.dim() == 2 and targets.dim() == 1:
        return F.cross_entropy(outputs, targets, reduction="none")

    def of_one(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.unsqueeze(0), target.unsqueeze(0)).sum()

    return vmap(of_one, randomness="different")(outputs, targets)


_SUMS = frozenset({WeightedSum, LipschitzSum})
_OURS = frozenset(
    kind
    for kind in (getattr(losses, name) for name in losses.__all__)
    if isinstance(kind, type) and issubclass(kind, RecordLoss) and kind not in _SUMS
)


def _is_plain_cross_entropy(loss: Loss) -> bool:
    """Without weights, smoothing or classes to ignore."""
    if loss is F.cross_entropy:
        return True
    if type(loss) is nn.CrossEntropyLoss:
        return loss.weight is None and loss.label_smoothing == 0 and loss.ignore_index == -100
    return False
