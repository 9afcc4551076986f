"""Outputs and targets brought to the shapes that losses are written for."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def one_number(outputs: Tensor, loss: object) -> Tensor:
    """(B,) or (B, 1) as (B,)."""
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        return outputs.squeeze(1)
    if outputs.dim() != 1:
        raise ValueError(
            f"{type(loss).__name__} takes one output a record; the model gives "
            f"{_numbers(outputs)}: end it with one output, or use a loss of several classes"
        )
    return outputs


def class_scores(outputs: Tensor, loss: object) -> Tensor:
    """(B, K) as it is and (B,) as (B, 1). More axes would make K another number than it seems."""
    if outputs.dim() == 1:
        return outputs.unsqueeze(1)
    if outputs.dim() != 2:
        raise ValueError(
            f"{type(loss).__name__} takes outputs of shape (records, classes); these have "
            f"{tuple(outputs.shape)}: flatten them, or use CrossEntropy"
        )
    return outputs


def is_true_class(scores_BK: Tensor, targets: Tensor) -> Tensor:
    """Where k = y. Of one score a record: where the target is positive, so 0/1 and −1/+1 do."""
    num_classes = scores_BK.shape[1]
    if num_classes == 1:
        return targets.reshape(-1, 1) > 0
    # Not F.one_hot, which asks the device whether a label is too large.
    classes_K = torch.arange(num_classes, device=targets.device)
    return targets.reshape(-1, 1) == classes_K


def signs(scores_BK: Tensor, targets: Tensor) -> Tensor:
    """+1 for the true class, −1 for the others, in the scores' type."""
    return 2 * is_true_class(scores_BK, targets).to(scores_BK.dtype) - 1


def paired(outputs: Tensor, targets: Tensor, loss: object) -> tuple[Tensor, Tensor]:
    """Both as (B, K), one target an output. (B,) against (B, 1) would broadcast to B² pairs."""
    if _numbers(outputs) != _numbers(targets):
        raise ValueError(
            f"{type(loss).__name__} takes one target an output; the model gives "
            f"{_numbers(outputs)} outputs a record, and there are {_numbers(targets)} targets"
        )
    return outputs.reshape(len(outputs), -1), targets.reshape(len(targets), -1)


def positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; give a number above 0")


def _numbers(rows: Tensor) -> int:
    return math.prod(rows.shape[1:])
