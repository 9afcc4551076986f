"""Accuracy and loss on held-out records, in batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tacit.data.records import Records
from tacit.queries.bounded_gradient import Loss


@dataclass(frozen=True)
class Metrics:
    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(model: nn.Module, records: Records, loss: Loss, batch_size: int = 2048) -> Metrics:
    """Share of records whose largest output is the target's, and their mean loss.

    The guarantee covers the training records only: what is read off these is not private.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    correct, total = 0.0, 0.0
    for start in range(0, len(records), batch_size):
        rows = slice(start, start + batch_size)
        targets = records.targets[rows].to(device)
        outputs = model(records.inputs[rows].to(device))
        correct += float((outputs.argmax(dim=1) == targets).sum())
        total += float(loss(outputs, targets).mean()) * len(targets)
    model.train(was_training)
    count = max(len(records), 1)
    return Metrics(accuracy=correct / count, loss=total / count)
