"""What every loss is: one number per record, and their mean.

What a loss trains for, which decides the metrics that a report may show.

Outputs and targets brought to the shapes that losses are written for.

Losses that change as training goes on.

What every loss is: one number a record, and their mean.

A loss of one's own, with the constant that its author answers for.

Sums of losses with weights: a * X + b * Y.
"""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.losses.pre_activations import needs_pre_activations
from tacit.pytrees import Tree, logits_of, tensors_of


class Task(enum.StrEnum):
    """What the outputs and targets of one record are.

    CLASSIFICATION: one output per class and a class as target, with classes along dimension 1; or
    one output, whose sign decides between two classes.
    BINARY: one output, whose sign decides; targets are 0 and 1, or −1 and +1.
    REGRESSION: one real-valued target per output.
    TOKENS: outputs of shape (records, positions, classes) and one class per position.
    """

    CLASSIFICATION = "classification"
    BINARY = "binary"
    REGRESSION = "regression"
    TOKENS = "tokens"


def task_of(loss: object, outputs: Tensor, targets: Tensor) -> Task | None:
    """The task that the loss declares for such outputs and targets; None where nobody says.

    Asked is `loss.task_for(outputs, targets)`, then `loss.task`; PyTorch's own losses are known
    here. A loss without a declaration is not guessed at: a single output may be a regression, and
    reading it as two classes would give a false accuracy.
    """
    ask = getattr(loss, "task_for", None)
    declared = getattr(loss, "task", None) if ask is None else ask(outputs, targets)
    if declared is not None:
        return Task(declared)
    if isinstance(loss, nn.Module):
        return _TORCH_MODULES.get(type(loss))
    return _TORCH_FUNCTIONS.get(getattr(loss, "__name__", "")) if _is_torchs(loss) else None


_TORCH_MODULES: dict[type[nn.Module], Task] = {
    nn.CrossEntropyLoss: Task.CLASSIFICATION,
    nn.NLLLoss: Task.CLASSIFICATION,
    nn.MultiMarginLoss: Task.CLASSIFICATION,
    nn.BCEWithLogitsLoss: Task.BINARY,
    nn.SoftMarginLoss: Task.BINARY,
    nn.MSELoss: Task.REGRESSION,
    nn.L1Loss: Task.REGRESSION,
    nn.SmoothL1Loss: Task.REGRESSION,
    nn.HuberLoss: Task.REGRESSION,
}
_TORCH_FUNCTIONS: dict[str, Task] = {
    "cross_entropy": Task.CLASSIFICATION,
    "nll_loss": Task.CLASSIFICATION,
    "multi_margin_loss": Task.CLASSIFICATION,
    "binary_cross_entropy_with_logits": Task.BINARY,
    "soft_margin_loss": Task.BINARY,
    "mse_loss": Task.REGRESSION,
    "l1_loss": Task.REGRESSION,
    "smooth_l1_loss": Task.REGRESSION,
    "huber_loss": Task.REGRESSION,
}


def _is_torchs(loss: object) -> bool:
    return loss is getattr(F, getattr(loss, "__name__", ""), None)


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


Kind = TypeVar("Kind")


@runtime_checkable
class Scheduled(Protocol):
    """A loss that wants to know the epoch, and so belongs to one run.

    The epoch is a public number: how often each record is expected to have taken part by now. The
    trainer says it before each step. In a loop of one's own, say `loss.at(epoch)`.
    """

    def at(self, epoch: float) -> None:
        """From here on the loss is that of this epoch, 0 at the beginning."""
        ...

    def fresh(self) -> Self:
        """The same loss at its beginning, sharing nothing that changes."""
        ...


def at_epoch(loss: object, epoch: float) -> None:
    """Tell the loss where it is, if it wants to know."""
    if isinstance(loss, Scheduled):
        loss.at(epoch)


def fresh(loss: Kind) -> Kind:
    """The loss at its beginning; itself, if it has none."""
    return loss.fresh() if isinstance(loss, Scheduled) else loss


class RecordLoss(abc.ABC):
    """ℓ(h, y) of each record by itself. Called, it gives the mean over the records given.

    A record's number depends on no other record, on no class count and on no statistic of the
    batch; else one record could move everyone's gradient, and no constant would hold.
    `a * X + b * Y` is a weighted sum of two of them.

    It takes one tensor of outputs and one of targets. Of a model that returns more than that it is
    given the `logits`. A loss of several outputs is a function of your own: see "Several outputs"
    in docs/extending.md.

    `task` says what the loss trains for (`tacit.losses.Task`), and so which metrics a report may
    show. None: a report shows the mean loss, and an accuracy only where the records declare
    classes and the model has one output per class.
    """

    task: ClassVar[Task | None] = None

    def task_for(self, outputs: Tensor, targets: Tensor) -> Task | None:
        """The task for such outputs and targets; `task`, unless the loss serves several."""
        return self.task

    @abc.abstractmethod
    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ℓ(h_i, y_i) for each record i: (B, …) and (B, …) to (B,)."""

    def __call__(self, outputs: Tree, targets: Tree) -> Tensor:
        return self.per_record(*tensors_for(self, outputs, targets)).mean()

    def __mul__(self, weight: float) -> WeightedSum:

        return weighted_sum([(float(weight), self)])

    __rmul__ = __mul__

    def __add__(self, other: RecordLoss) -> WeightedSum:

        if not isinstance(other, RecordLoss):
            return NotImplemented
        return weighted_sum([(1.0, self), (1.0, other)])


class LipschitzLoss(RecordLoss):
    """A loss whose gradient in one record's outputs has a largest norm."""

    @abc.abstractmethod
    def lipschitz_for(self, num_outputs: int) -> float:
        """max ‖∇_h ℓ(h, y)‖₂ over all outputs h of one record and all targets y.

        `num_outputs` is how many numbers h has, which the network's shape makes public.
        """


def tensors_for(loss: object, outputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
    """What a loss of two tensors takes: the logits of the outputs, and the only target."""
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        return outputs, targets
    name = getattr(loss, "__name__", type(loss).__name__)
    h, y = logits_of(outputs), tensors_of(targets)
    if h is None:
        raise ValueError(
            f"{name} takes one tensor, and the model returns {len(tensors_of(outputs))}, none of "
            "them called logits; give a function of your own, such as "
            f"lambda out, y: {name}(out[0], y)"
        )
    if len(y) != 1:
        raise ValueError(
            f"{name} takes one tensor of targets, and the records have {len(y)}; give "
            "Records(inputs, targets=...), the tokens themselves for a language model, or a loss "
            "that is a function of your own"
        )
    return h, y[0]


@dataclass(frozen=True)
class WithConstant:
    """`loss`, declared to have a gradient of norm at most `lipschitz` in one record's outputs.

    The privacy of a clipless run rests on that number. `attack_constant` looks for a gradient
    that is longer; finding none proves nothing. `task` says what the loss trains for, where `loss`
    itself does not.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    lipschitz: float
    task: Task | None = None

    def __post_init__(self) -> None:
        positive("lipschitz", self.lipschitz)

    def lipschitz_for(self, num_outputs: int) -> float:
        """The declared constant, whatever the number of outputs."""
        return self.lipschitz

    def task_for(self, outputs: Tensor, targets: Tensor) -> Task | None:
        return task_of(self.loss, outputs, targets) if self.task is None else self.task

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)


@dataclass(frozen=True)
class WeightedSum(RecordLoss):
    """ℓ = Σ_j w_j·ℓ_j. Made by `weighted_sum`, or by writing a * X + b * Y."""

    parts: tuple[RecordLoss, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.parts or len(self.parts) != len(self.weights):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.parts)} losses; give one a loss, and "
                "at least one loss"
            )
        for weight in self.weights:
            if not math.isfinite(weight):
                raise ValueError(f"a weight is {weight}; give a finite number")

    @property
    def needs_pre_activations(self) -> bool:
        return any(needs_pre_activations(part) for part in self.parts)

    def task_for(self, outputs: Tensor, targets: Tensor) -> Task | None:
        """The task of the parts that declare one; None where they disagree."""
        declared = {part.task_for(outputs, targets) for part in self.parts} - {None}
        return declared.pop() if len(declared) == 1 else None

    def at(self, epoch: float) -> None:
        """Tell the parts that change with the epoch where they are."""
        for part in self.parts:
            at_epoch(part, epoch)

    def fresh(self) -> Self:
        return replace(self, parts=tuple(fresh(part) for part in self.parts))

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        first, *others = (
            weight * part.per_record(outputs, targets)
            for part, weight in zip(self.parts, self.weights, strict=True)
        )
        return sum(others, first)


@dataclass(frozen=True)
class LipschitzSum(WeightedSum, LipschitzLoss):
    """A weighted sum of losses that all have a constant.

    ‖Σ_j w_j·∇ℓ_j‖ ≤ Σ_j |w_j|·L_j, the triangle inequality.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.parts:
            if not isinstance(part, LipschitzLoss):
                raise ValueError(
                    f"{type(part).__name__} has no Lipschitz constant, so the sum has none; use "
                    "WeightedSum"
                )

    def lipschitz_for(self, num_outputs: int) -> float:
        return math.fsum(
            abs(weight) * part.lipschitz_for(num_outputs)
            for part, weight in zip(self.parts, self.weights, strict=True)
            if isinstance(part, LipschitzLoss)
        )


def weighted_sum(terms: Sequence[tuple[float, RecordLoss]]) -> WeightedSum:
    """Σ_j w_j·ℓ_j, which has a constant where all its parts have one; sums inside are opened."""
    parts: list[RecordLoss] = []
    weights: list[float] = []
    for weight, part in terms:
        if isinstance(part, WeightedSum):
            parts += part.parts
            weights += [weight * w for w in part.weights]
        else:
            parts.append(part)
            weights.append(weight)
    bounded = all(isinstance(part, LipschitzLoss) for part in parts)
    return (LipschitzSum if bounded else WeightedSum)(tuple(parts), tuple(weights))
