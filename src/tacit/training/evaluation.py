"""Metrics of held-out records, by the task that the loss declares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tacit.losses.classification import TokenCrossEntropy
from tacit.losses.record_loss import WeightedSum, WithConstant, losses_of
from tacit.losses.registry import Task, task_of
from tacit.losses.tailored import watched
from tacit.pytrees import Tree, call_model, logits_of, tensors_of
from tacit.queries.bounded_gradient import Loss
from tacit.records import Records, as_records
from tacit.statistics.tracking import evaluating
from tacit.training.rehearsal import floating_type


@dataclass(frozen=True)
class Metrics:
    """Metrics of some records. None is what the task does not have; without records, all are None.

    `loss` is the mean over records. A classification has an `accuracy`, a regression has the mean
    absolute error, the root mean squared error and R² = 1 − Σ(h − y)² / Σ(y − ȳ)², with ȳ the mean
    of each output's own targets (None where all targets are equal). Where a record has several
    targets, such as tokens, `accuracy` is the share of right targets among all that the loss does
    not ignore.
    """

    accuracy: float | None = None
    loss: float | None = None
    mean_absolute_error: float | None = None
    root_mean_squared_error: float | None = None
    r_squared: float | None = None

    def facts(self) -> dict[str, float | None]:
        """Accuracy and loss, None where there is none, and the other metrics where they apply."""
        always = ("accuracy", "loss")
        return {k: v for k, v in asdict(self).items() if k in always or v is not None}

    def text(self) -> str:
        """One line, for a progress bar."""
        return "  ".join(f"{name} {value}" for name, value in metric_rows(self.facts()))


def metric_rows(facts: dict[str, float | None]) -> list[tuple[str, str]]:
    """(name, value) of the metrics that were measured, in words; the task's own come first."""
    values = {name: facts.get(name) for name in _WORDS}
    return [
        (_WORDS[name][0], format(float(value), _WORDS[name][1]))
        for name, value in values.items()
        if value is not None
    ]


_WORDS = {
    "accuracy": ("accuracy", ".2%"),
    "root_mean_squared_error": ("RMSE", ".4g"),
    "mean_absolute_error": ("MAE", ".4g"),
    "r_squared": ("R²", ".4g"),
    "loss": ("loss", ".4g"),
}


@torch.no_grad()
def evaluate(model: nn.Module, records: Records, loss: Loss, batch_size: int = 2048) -> Metrics:
    """The mean loss of the records, and the metrics of the loss's task (`tacit.losses.Task`).

    A record is classified by its largest output; a single output decides by its sign, between
    targets 0 and 1 or −1 and +1. If the loss declares no task, there is an accuracy only where the
    records declare `num_classes` and the model has that many outputs per target. If the model
    returns several tensors, the metrics are those of its `logits`. Without a tensor of that name,
    and where records have several targets or none, there is only the loss.

    The guarantee covers the training records only: metrics of other records are not private.
    """
    records = as_records(records)
    if len(records) == 0:
        return Metrics()
    device, floating = next(model.parameters()).device, floating_type(model)
    total, parts = 0.0, []
    with evaluating(model):
        for piece in pieces_of(records, batch_size):
            piece = piece.to(device, floating)
            with watched(model, loss):
                outputs = call_model(model, piece.inputs)
                total += float(losses_of(loss, outputs, piece.targets).double().sum())
            parts.append(_part_of(loss, outputs, piece))
    mean = total / len(records)
    kept = [part.targets for part in parts if part.targets is not None]
    every_target = torch.cat(kept) if kept else None
    tasks = {part.task for part in parts}
    if tasks == {Task.REGRESSION}:
        assert every_target is not None
        return _errors(parts, every_target, mean)
    decided = sum(part.decided for part in parts)
    if every_target is not None and not two_classes(every_target):  # one output, by its sign
        return Metrics(loss=mean)
    if not tasks <= {Task.CLASSIFICATION, Task.BINARY, Task.TOKENS} or not decided:
        return Metrics(loss=mean)
    return Metrics(sum(part.right for part in parts) / decided, mean)


def pieces_of(records: Records, size: int) -> Iterator[Records]:
    """The records in order, `size` at a time, in memory."""
    for start in range(0, len(records), size):
        yield records.take(slice(start, start + size)).read()


def _only(targets: Tree) -> Tensor | None:
    tensors = tensors_of(targets)
    return tensors[0] if len(tensors) == 1 else None


class _Part(NamedTuple):
    """What one batch adds: how many targets are right, of how many, or sums of errors.

    `targets` are kept where the metric depends on all of them.
    """

    task: Task | None
    right: float = 0.0
    decided: float = 0.0
    absolute: float = 0.0
    squared: float = 0.0
    targets: Tensor | None = None


def _part_of(loss: Loss, outputs: Tree, piece: Records) -> _Part:
    h, y = logits_of(outputs), _only(piece.targets)
    if h is None or y is None:
        return _Part(None)
    fields = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    named = fields.get("logits") is h
    task = task_of(loss, h, y) or _undeclared(h, y, piece.num_classes, named)
    inner = _innermost(loss)
    if isinstance(inner, TokenCrossEntropy) and y.dim() == 2:
        y = inner.aligned(y)
    if task is Task.REGRESSION and h.numel() == y.numel():
        errors = h.double().reshape(-1) - y.double().reshape(-1)
        absolute, squared = float(errors.abs().sum()), float(errors.square().sum())
        return _Part(task, absolute=absolute, squared=squared, targets=y)
    right = None if task in (None, Task.REGRESSION) else _right(h, y, task)
    if right is None:
        return _Part(None)
    counted = y.reshape(right.shape) != getattr(inner, "ignore_index", -100)
    by_sign = y if _one_output(h, task) else None
    return _Part(task, float((right & counted).sum()), float(counted.sum()), targets=by_sign)


def _innermost(loss: object) -> object:
    """The loss of tokens inside a declared constant or a sum; else the loss itself."""
    if isinstance(loss, WithConstant):
        return _innermost(loss.loss)
    if isinstance(loss, WeightedSum):
        tokens = [part for part in loss.parts if isinstance(part, TokenCrossEntropy)]
        return tokens[0] if tokens else loss
    return loss


def two_classes(targets: Tensor) -> bool:
    """Whether the targets are 0 and 1, or −1 and +1: what the sign of one output can decide."""
    above = targets == 1
    return any(bool((above | (targets == below)).all()) for below in (0, -1))


def _undeclared(outputs: Tensor, targets: Tensor, classes: int | None, named: bool) -> Task | None:
    """For a loss that declares nothing: classes that the records declare, one output for each.

    A field that a model calls logits says as much for a record with one class.
    """
    if named and targets.dim() == 1 and outputs.dim() == 2 and outputs.shape[1] > 1:
        return None if targets.is_floating_point() else Task.CLASSIFICATION
    if classes is None or classes < 2 or targets.is_floating_point():
        return None
    if targets.dim() == 1 and outputs.shape[1:] == (classes,):
        return Task.CLASSIFICATION
    if targets.dim() == 2 and outputs.shape[1:] == (targets.shape[1], classes):
        # As many positions as classes: which axis is which cannot be told.
        return Task.TOKENS if targets.shape[1] != classes else None
    return None


def _one_output(outputs: Tensor, task: Task | None) -> bool:
    """Whether the sign of one output decides between two classes."""
    one = outputs.dim() == 1 or outputs.shape[1:] == (1,)
    return one and task in (Task.BINARY, Task.CLASSIFICATION)


def _right(outputs: Tensor, targets: Tensor, task: Task) -> Tensor | None:
    """Whether each target is predicted right; None if that cannot be decided."""
    if task is Task.BINARY or _one_output(outputs, task):
        if not _one_output(outputs, task) or targets.numel() != len(outputs):
            return None
        return (outputs.reshape(-1) > 0) == (targets.reshape(-1) > 0)
    axis = -1 if task is Task.TOKENS else 1
    if targets.is_floating_point() or outputs.dim() != targets.dim() + 1:
        return None
    decided = outputs.argmax(dim=axis)
    return decided == targets if decided.shape == targets.shape else None


def _errors(parts: list[_Part], targets: Tensor, loss: float) -> Metrics:
    y = targets.double().reshape(len(targets), -1)
    squared = math.fsum(part.squared for part in parts)
    spread = float((y - y.mean(dim=0)).square().sum())
    return Metrics(
        loss=loss,
        mean_absolute_error=math.fsum(part.absolute for part in parts) / y.numel(),
        root_mean_squared_error=math.sqrt(squared / y.numel()),
        r_squared=1 - squared / spread if spread > 0 else None,
    )
