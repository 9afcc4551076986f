"""Metrics of held-out records, by the task that the loss declares, and of a constant answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.losses.classification import TokenCrossEntropy
from tacit.losses.record_loss import WeightedSum, WithConstant, losses_of
from tacit.losses.registry import Task, task_of
from tacit.losses.tailored import watched
from tacit.precision import floating_type
from tacit.prefetch import rows_in_order
from tacit.pytrees import Tree, call_model, logits_of, tensors_of
from tacit.records import Records, as_records
from tacit.statistics.tracking import evaluating

if TYPE_CHECKING:
    from tacit.queries.bounded_gradient import Loss


@dataclass(frozen=True)
class Metrics:
    """Metrics of some records. None is what the task does not have; without records, all are None.

    `loss` is the mean over records. A classification has an `accuracy`, a regression has the mean
    absolute error, the root mean squared error and R² = 1 − Σ(h − y)² / Σ(y − ȳ)², with ȳ the mean
    of each output's own targets (None where all targets are equal). Where a record has several
    targets, such as tokens, `accuracy` is the share of right targets among all that the loss does
    not ignore. A causal language model has a `perplexity`, exp of the mean loss over all tokens of
    all records: long records weigh more in it than in `loss`.

    For classes and labels there are also
    - `balanced_accuracy`, the mean over classes of the share of each class that is right;
    - `auroc`, the probability that a record of the class has a larger score than one of another
      class, where equal scores count one half; for more than two classes it is the mean over
      classes, each against the rest. A class that all records have, or none, does not count;
    - `log_loss`, the mean of −log p(y) with the probabilities of `probabilities`.
    Of several labels per record, each metric is the mean over labels.
    """

    accuracy: float | None = None
    loss: float | None = None
    balanced_accuracy: float | None = None
    auroc: float | None = None
    log_loss: float | None = None
    mean_absolute_error: float | None = None
    root_mean_squared_error: float | None = None
    r_squared: float | None = None
    perplexity: float | None = None
    task: Task | None = None

    def facts(self) -> dict[str, float | None]:
        """Accuracy and loss, None where there is none, and the other metrics where they apply."""
        always = ("accuracy", "loss")
        values = {name: value for name, value in asdict(self).items() if name != "task"}
        return {k: v for k, v in values.items() if k in always or v is not None}

    def in_units(self, unit: float) -> Metrics:
        """The same errors where targets were divided by `unit` before training."""
        return _in_units(self, unit)

    def text(self) -> str:
        """One line, for a progress bar."""
        facts = {n: v for n, v in self.facts().items() if n not in _IN_REPORTS_ALONE}
        return "  ".join(f"{name} {value}" for name, value in metric_rows(facts))


Errors = TypeVar("Errors", "Metrics", "Baseline")


def _in_units(errors: Errors, unit: float) -> Errors:
    names = ("mean_absolute_error", "root_mean_squared_error")
    given = {name: getattr(errors, name) for name in names}
    changed: dict[str, Any] = {n: unit * v for n, v in given.items() if v is not None}
    return replace(errors, **changed)


def metric_rows(facts: dict[str, float | None]) -> list[tuple[str, str]]:
    """(name, value) of the metrics that were measured, in words; the task's own come first."""
    values = {name: facts.get(name) for name in _WORDS}
    return [
        (_WORDS[name][0], format(float(value), _WORDS[name][1]))
        for name, value in values.items()
        if value is not None
    ]


_WORDS = {
    "perplexity": ("perplexity", ".4g"),
    "accuracy": ("accuracy", ".2%"),
    "balanced_accuracy": ("balanced accuracy", ".2%"),
    "auroc": ("AUROC", ".4f"),
    "log_loss": ("log loss", ".4g"),
    "root_mean_squared_error": ("RMSE", ".4g"),
    "mean_absolute_error": ("MAE", ".4g"),
    "r_squared": ("R²", ".4g"),
    "loss": ("loss", ".4g"),
}
_IN_REPORTS_ALONE = ("balanced_accuracy", "auroc", "log_loss")


@torch.no_grad()
def evaluate(
    model: nn.Module, records: Records, loss: Loss, batch_size: int | None = None
) -> Metrics:
    """The mean loss of the records, and the metrics of the loss's task (`tacit.losses.Task`).

    A record is classified by its largest output; a single output decides by its sign, between
    targets 0 and 1 or −1 and +1, and so does each output of several labels. If the loss declares no
    task, there is an accuracy only where the records declare `num_classes` and the model has that
    many outputs per target. If the model returns several tensors, the metrics are those of its
    `logits`. Without a tensor of that name, and where records have several targets or none, there
    is only the loss.

    The guarantee covers the training records only: metrics of other records are not private.
    """
    batch_size = min(batch_size or _MOST_AT_ONCE, _MOST_AT_ONCE)
    records = as_records(records)
    if len(records) == 0:
        return Metrics()
    total, num_scored = 0.0, 0
    over_tokens, num_tokens = 0.0, 0
    parts: list[_Part] = []
    kept: dict[str, Tensor] = {}
    with evaluating(model):
        for piece in pieces_of(records, batch_size, model):
            with watched(model, loss):
                outputs = call_model(model, piece.inputs)
                losses_B = losses_of(loss, outputs, piece.targets).double()
                total += float(losses_B.sum())
            counts_B = _token_counts(loss, piece)
            if counts_B is not None:
                over_tokens += float((losses_B * counts_B).sum())
                num_tokens += int(counts_B.sum())
            part = _part_of(loss, outputs, piece)
            num_scored += part.scores is not None
            parts.append(_moved(part, kept, len(parts) * batch_size, len(records)))
    mean = total / len(records)
    every_target = kept.get("targets")
    tasks = {part.task for part in parts}
    if tasks == {Task.REGRESSION}:
        assert every_target is not None
        return _errors(parts, every_target, mean)
    decided = sum(part.decided for part in parts)
    if every_target is not None and not two_classes(every_target):  # signs decide
        return Metrics(loss=mean)
    if not tasks <= _DECIDING or not decided:
        return Metrics(loss=mean)
    accuracy = sum(part.right for part in parts) / decided
    (task,) = tasks if len(tasks) == 1 else {None}
    if num_scored < len(parts):
        perplexity = _exp(over_tokens / num_tokens) if num_tokens else None
        return Metrics(accuracy, mean, perplexity=perplexity, task=task)
    balanced, auroc, log_loss = _of_scores(kept["scores"], kept["truth"], temperature_of(loss))
    return Metrics(accuracy, mean, balanced, auroc, log_loss, task=task)


_MOST_AT_ONCE = 2048
_DECIDING = {Task.CLASSIFICATION, Task.BINARY, Task.MULTI_LABEL, Task.TOKENS}


def temperature_of(loss: object) -> float:
    """τ of a loss that divides its outputs by it, and 1 for any other."""
    inner = loss.loss if isinstance(loss, WithConstant) else loss
    return float(getattr(inner, "temperature", 1.0))


def probabilities(outputs: Tensor, task: Task, temperature: float = 1.0) -> Tensor:
    """Probabilities of classes or labels, in float64: the softmax of h/τ, or the sigmoid of each.

    One output for two classes gives two columns, p(negative) and p(positive). They are what a
    cross-entropy with temperature τ is trained for; for a loss without a likelihood, such as a
    hinge, they order the classes and are not calibrated.
    """
    h = outputs.double() / temperature
    if task is Task.MULTI_LABEL:
        return torch.sigmoid(h)
    if h.dim() == 1 or h.shape[1:] == (1,):
        h = h.reshape(-1, 1)
        return torch.cat([torch.sigmoid(-h), torch.sigmoid(h)], dim=1)
    return torch.softmax(h, dim=-1 if task is Task.TOKENS else 1)


def _of_scores(
    scores: Tensor, truth: Tensor, temperature: float
) -> tuple[float | None, float | None, float | None]:
    """Balanced accuracy, AUROC and log loss of one column per class or label."""
    if not scores.isfinite().all():
        return None, None, None
    h = scores.double() / temperature
    if truth.dim() == 2:  # labels, or one output for two classes
        truth = truth > 0
        hits = [_balanced(h[:, k] > 0, truth[:, k], 2) for k in range(h.shape[1])]
        log_loss = F.softplus(torch.where(truth, -h, h)).mean()
        ranked, positive = h, truth
    else:
        hits = [_balanced(scores.argmax(dim=1), truth, h.shape[1])]
        log_loss = F.cross_entropy(h, truth)
        ranked = torch.softmax(h, dim=1)
        positive = truth[:, None] == torch.arange(h.shape[1])
        if h.shape[1] == 2:  # both columns say the same
            ranked, positive = h[:, 1:] - h[:, :1], positive[:, 1:]
    return _mean(hits), _mean(_auroc(ranked, positive)), float(log_loss)


def _balanced(decided: Tensor, truth: Tensor, num_classes: int) -> float:
    """The mean over the classes that occur of the share of their records that is right."""
    counts = torch.bincount(truth.long(), minlength=num_classes)
    right = torch.bincount(truth[decided == truth].long(), minlength=num_classes)
    return float((right[counts > 0] / counts[counts > 0]).mean())


def _auroc(scores_NK: Tensor, positive_NK: Tensor) -> list[float]:
    """Of each column that has both: P(positive > negative) + ½·P(equal), from the ranks.

    (R − P(P + 1)/2) / (P·Q) with the sum R of the ranks of P positives beside Q negatives, where
    equal scores share their mean rank  [Mann & Whitney 1947].
    """
    from scipy.stats import rankdata

    areas = []
    for k in range(scores_NK.shape[1]):  # one at a time: ranks take several times their memory
        positive_N = positive_NK[:, k]
        num = int(positive_N.sum())
        pairs = num * (len(positive_N) - num)
        if pairs:
            ranks_N = torch.from_numpy(rankdata(scores_NK[:, k].numpy()))
            areas.append((float(ranks_N[positive_N].sum()) - num * (num + 1) / 2) / pairs)
    return areas


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


# ---- a baseline ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Baseline:
    """What a constant answer reaches on the same held-out records, and what it always answers.

    The constant is taken from the held-out records themselves, never from the training records.
    """

    predictor: str
    accuracy: float | None = None
    root_mean_squared_error: float | None = None
    mean_absolute_error: float | None = None

    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def in_units(self, unit: float) -> Baseline:
        """The same errors where targets were divided by `unit`."""
        return _in_units(self, unit)

    def note(self, metrics: Metrics) -> str | None:
        """A sentence for the report if the model is not better, else None."""
        ours, constant = metrics.accuracy, self.accuracy
        if ours is not None and constant is not None:
            beaten, words = ours > constant, f"accuracy {ours:.2%} against {constant:.2%}"
        else:
            ours, constant = metrics.root_mean_squared_error, self.root_mean_squared_error
            if ours is None or constant is None:
                return None
            beaten, words = ours < constant, f"RMSE {ours:.4g} against {constant:.4g}"
        return None if beaten else f"the model has not beaten {self.predictor}: {words}"


def baseline_of(records: Records, task: Task | None) -> Baseline | None:
    """The most frequent class, the more frequent value of each label, or the mean target.

    None where the task has no such constant, or there are no records.
    """
    y = _only(records.targets)
    if y is None or len(records) == 0:
        return None
    if records.is_lazy:
        y = torch.cat([tensors_of(piece.targets)[0] for piece in pieces_of(records, 2048)])
    if task is Task.REGRESSION:
        errors = y.double() - y.double().mean(dim=0)
        return Baseline(
            "the mean of the held-out targets",
            root_mean_squared_error=float(errors.square().mean().sqrt()),
            mean_absolute_error=float(errors.abs().mean()),
        )
    if task is Task.MULTI_LABEL:
        shares = (y > 0).double().mean(dim=0)
        return Baseline(
            "the more frequent value of each label of the held-out records",
            accuracy=float(torch.maximum(shares, 1 - shares).mean()),
        )
    if task in (Task.CLASSIFICATION, Task.BINARY) and y.numel() == len(records):
        counts = torch.unique(y, return_counts=True)[1]
        return Baseline(
            "the most frequent class of the held-out records",
            accuracy=float(counts.max()) / len(records),
        )
    return None


# ---- batches -------------------------------------------------------------------------------------


def pieces_of(records: Records, size: int, model: nn.Module | None = None) -> Iterator[Records]:
    """The records in order, `size` at a time and in memory; on the device of `model`, in its type.

    What is read lazily is read ahead, as in training.
    """
    first = None if model is None else next(model.parameters(), None)
    tree = records.inputs, records.targets
    starts = range(0, len(records), size)
    values: Iterator[Any] = repeat(None)
    if records.is_lazy:
        values = rows_in_order(tree, len(records), size, records.device)
    for start, read in zip(starts, values, strict=False):
        piece = records.take(slice(start, start + size))
        if read is not None:
            piece = replace(piece, inputs=read[0], targets=read[1])
        if first is not None:
            assert model is not None
            piece = piece.to(first.device, floating_type(model))
        yield piece


def _only(targets: Tree) -> Tensor | None:
    tensors = tensors_of(targets)
    return tensors[0] if len(tensors) == 1 else None


class _Part(NamedTuple):
    """What one batch adds: how many targets are right, of how many, or sums of errors.

    `targets` are kept where the metric depends on all of them. `scores` are the outputs on the CPU,
    one column per class or label, and `truth` the classes (N,) or whether each column holds (N, L).
    """

    task: Task | None
    right: float = 0.0
    decided: float = 0.0
    absolute: float = 0.0
    squared: float = 0.0
    targets: Tensor | None = None
    scores: Tensor | None = None
    truth: Tensor | None = None


def _part_of(loss: Loss, outputs: Tree, piece: Records) -> _Part:
    h, y = logits_of(outputs), _only(piece.targets)
    if h is None or y is None:
        return _Part(None)
    fields = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    named = fields.get("logits") is h
    task = task_of(loss, h, y) or _undeclared(h, y, piece.num_classes, named)
    inner = _innermost(loss)
    if isinstance(inner, TokenCrossEntropy) and y.dim() > 1:
        y = inner.aligned(y)
    if task is Task.REGRESSION and h.numel() == y.numel():
        errors = h.double().reshape(-1) - y.double().reshape(-1)
        absolute, squared = float(errors.abs().sum()), float(errors.square().sum())
        return _Part(task, absolute=absolute, squared=squared, targets=y)
    right = None if task in (None, Task.REGRESSION) else _right(h, y, task)
    if task is None or right is None:
        return _Part(None)
    counted = y.reshape(right.shape) != getattr(inner, "ignore_index", -100)
    by_sign = y if _signs_decide(h, task) else None
    part = _Part(task, float((right & counted).sum()), float(counted.sum()), targets=by_sign)
    scores = h.unsqueeze(1) if h.dim() == 1 else h
    if task is Task.TOKENS or scores.dim() != 2 or not counted.all():
        return part
    if task is Task.MULTI_LABEL or scores.shape[1] == 1:
        truth = y.reshape(len(y), -1) > 0
    elif bool(((y >= 0) & (y < scores.shape[1])).all()):
        truth = y
    else:  # a class without an output
        return part
    return part._replace(scores=scores.float().cpu(), truth=truth.cpu())


def _token_counts(loss: Loss, piece: Records) -> Tensor | None:
    """How many tokens each record predicts; None unless the loss is that of a causal model."""
    y = _only(piece.targets)
    causal = isinstance(loss, TokenCrossEntropy) and loss.shift and not loss.label_smoothing
    if not causal or y is None:
        return None
    assert isinstance(loss, TokenCrossEntropy)
    return loss.counts(loss.aligned(y))


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < 700 else math.inf


def _moved(part: _Part, kept: dict[str, Tensor], row: int, count: int) -> _Part:
    """The part without its tensors, which are moved to their rows of tensors for all records.

    Small tensors that are kept between large pieces would split the heap: each piece would then
    take new memory, as if all records were held at once.
    """
    for name in ("targets", "scores", "truth"):
        values = getattr(part, name)
        if values is not None:
            if name not in kept:
                kept[name] = values.new_empty((count, *values.shape[1:]))
            kept[name][row : row + len(values)] = values
    return part._replace(targets=None, scores=None, truth=None)


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


def _signs_decide(outputs: Tensor, task: Task | None) -> bool:
    """Whether the sign of one output decides between two classes, or of each between yes and no."""
    one = outputs.dim() == 1 or outputs.shape[1:] == (1,)
    return task is Task.MULTI_LABEL or (one and task in (Task.BINARY, Task.CLASSIFICATION))


def decide(outputs: Tensor, task: Task) -> Tensor:
    """The class of each record or position, or, where signs decide, whether each is positive."""
    if task is Task.MULTI_LABEL:
        return outputs > 0
    if task is Task.BINARY or _signs_decide(outputs, task):
        return outputs.reshape(-1) > 0
    return outputs.argmax(dim=-1 if task is Task.TOKENS else 1)


def _right(outputs: Tensor, targets: Tensor, task: Task) -> Tensor | None:
    """Whether each target is predicted right; None if that cannot be decided."""
    if task is Task.MULTI_LABEL:
        return decide(outputs, task) == (targets > 0) if outputs.shape == targets.shape else None
    if task is Task.BINARY or _signs_decide(outputs, task):
        if not _signs_decide(outputs, task) or targets.numel() != len(outputs):
            return None
        return decide(outputs, task) == (targets.reshape(-1) > 0)
    if targets.is_floating_point() or outputs.dim() != targets.dim() + 1:
        return None
    decided = decide(outputs, task)
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
        task=Task.REGRESSION,
    )
