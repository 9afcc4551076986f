"""Accuracy and loss on held-out records, in batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.data.records import Records
from tacit.losses.pre_activations import watched
from tacit.queries.bounded_gradient import Loss
from tacit.statistics.modes import evaluating


@dataclass(frozen=True)
class Metrics:
    """None for both where there was no record to evaluate."""

    accuracy: float | None
    loss: float | None


@torch.no_grad()
def evaluate(model: nn.Module, records: Records, loss: Loss, batch_size: int = 2048) -> Metrics:
    """Share of records whose largest output is the target's, and their mean loss.

    A single output stands for two classes, by its sign; outputs with positions, (B, T, K), are
    right at a position each. Without records there is neither: both are None.
    The guarantee covers the training records only: what is read off these is not private.
    """
    if len(records) == 0:
        return Metrics(accuracy=None, loss=None)
    device = next(model.parameters()).device
    correct, total = 0.0, 0.0
    with evaluating(model):
        for start in range(0, len(records), batch_size):
            rows = slice(start, start + batch_size)
            targets = records.targets[rows].to(device)
            with watched(model, loss):
                outputs = model(records.inputs[rows].to(device))
                total += float(loss(outputs, targets).mean()) * len(targets)
            correct += float(_right(outputs, targets).sum())
    return Metrics(accuracy=correct / len(records), loss=total / len(records))


def _right(outputs: Tensor, targets: Tensor) -> Tensor:
    """One number a record: the share of its predictions that are right."""
    if outputs.dim() == 1 or outputs.shape[-1] == 1:
        return ((outputs.reshape(len(outputs)) > 0) == (targets.reshape(len(targets)) > 0)).double()
    if outputs.dim() == 3 and targets.dim() == 2:
        return (outputs.argmax(dim=-1) == targets).double().mean(dim=1)
    return (outputs.argmax(dim=1) == targets).double()
