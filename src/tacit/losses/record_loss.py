"""What every loss is: one number per record, which depends on that record alone.

`RecordLoss` is the base class, `LipschitzLoss` the one of losses whose gradient is bounded. Losses
are added and multiplied by numbers (`WeightedSum`), may follow the epoch (`Scheduled`), and a loss
of your own may declare its constant (`WithConstant`). `loss_constant` finds the constant of any.
The functions at the end bring outputs and targets to the shapes that losses are written for.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from tacit.errors import UnboundedLayer
from tacit.losses.task import Task, task_of
from tacit.pytrees import Tree, logits_of, tensors_of

Kind = TypeVar("Kind")


class RecordLoss(abc.ABC):
    """ℓ(h, y) of each record by itself. A call gives the mean over the records.

    A record's number depends on no other record, on no class count and on no statistic of the
    batch; else one record could move everyone's gradient, and no constant would hold.
    `a * X + b * Y` is a weighted sum of two losses.

    It takes one tensor of outputs and one of targets: if the model returns several, its `logits`.
    For a loss of several outputs write a function: see "Several outputs" in docs/extending.md.

    `task` says what the loss trains for, and so which metrics a report may show. If it is None, a
    report shows the mean loss, and an accuracy only where the records declare classes and the
    model has one output per class.
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


def loss_constant(loss: object, num_outputs: int) -> float:
    """The largest norm of one record's loss gradient in its outputs; UnboundedLayer if unknown."""
    constant = loss_constant_or_none(loss, num_outputs)
    if constant is not None:
        return constant
    raise UnboundedLayer(
        f"the loss {name_of(loss)!r} has no known Lipschitz constant; use one of tacit.losses, "
        "such as CrossEntropy(), say what it is with tacit.losses.WithConstant(loss, lipschitz), "
        "or clip the loss gradient with Clipless(gradient_clip=…)"
    )


def loss_constant_or_none(loss: object, num_outputs: int) -> float | None:
    """The constant that the loss declares: `lipschitz_for(num_outputs)`, else `lipschitz`.

    PyTorch's own losses have none: a record chooses its targets, and cross-entropy of a soft label
    of 10⁶, or of many positions summed, has no gradient of norm √2.
    """
    ask: Callable[[int], float] | None = getattr(loss, "lipschitz_for", None)
    constant = getattr(loss, "lipschitz", None) if ask is None else ask(num_outputs)
    return None if constant is None else float(constant)


@dataclass(frozen=True)
class ClippedLoss:
    """A loss whose gradient in the outputs is clipped to norm `max_norm`, record by record."""

    loss: object
    max_norm: float

    def lipschitz_for(self, num_outputs: int) -> float:
        own = loss_constant_or_none(self.loss, num_outputs)
        return self.max_norm if own is None else min(self.max_norm, own)


@dataclass(frozen=True)
class WithConstant:
    """`loss`, declared to have a gradient of norm at most `lipschitz` in one record's outputs.

    The privacy of a clipless run rests on that number. `attack_constant` looks for a longer
    gradient; finding none proves nothing. `task` says what the loss trains for, if `loss` itself
    does not.
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


@runtime_checkable
class Scheduled(Protocol):
    """A loss that depends on the epoch, and so belongs to one run.

    The epoch is a public number: how often each record is expected to have taken part by now. The
    trainer sets it before each step. In your own loop, call `loss.at(epoch)`.
    """

    def at(self, epoch: float) -> None:
        """Make this the loss of that epoch, 0 at the beginning."""
        ...

    def fresh(self) -> Self:
        """The same loss at epoch 0, sharing nothing that changes."""
        ...


def fresh(loss: Kind) -> Kind:
    """The loss at epoch 0; itself, if it is not `Scheduled`."""
    return loss.fresh() if isinstance(loss, Scheduled) else loss


@dataclass(frozen=True)
class WeightedSum(RecordLoss):
    """ℓ = Σ_j w_j·ℓ_j. Made by `weighted_sum`, or by writing a * X + b * Y."""

    parts: tuple[RecordLoss, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.parts or len(self.parts) != len(self.weights):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.parts)} losses; give one per loss, and "
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
        for part in self.parts:
            if isinstance(part, Scheduled):
                part.at(epoch)

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
    """Σ_j w_j·ℓ_j. It has a constant if all its parts have one; sums inside are opened."""
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


def needs_pre_activations(loss: object) -> bool:
    """Whether the loss can only be called inside `watched`."""
    return bool(getattr(loss, "needs_pre_activations", False))


def name_of(loss: object) -> str:
    """The loss's name, for messages."""
    return str(getattr(loss, "__name__", type(loss).__name__))


def positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; give a number above 0")


def tensors_for(loss: object, outputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
    """What a loss of two tensors takes: the logits of the outputs, and the only target."""
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        return outputs, targets
    name = name_of(loss)
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


def class_scores(outputs: Tensor, loss: object, at_least: int = 1) -> Tensor:
    """(B, K) as it is and (B,) as (B, 1). More axes would make K another number than it seems."""
    scores_BK = outputs.unsqueeze(1) if outputs.dim() == 1 else outputs
    if scores_BK.dim() != 2:
        raise ValueError(
            f"{type(loss).__name__} takes outputs of shape (records, classes); these have "
            f"{tuple(outputs.shape)}: flatten them, or use CrossEntropy"
        )
    require_outputs(scores_BK.shape[1], loss, at_least)
    return scores_BK


def require_outputs(num_outputs: int, loss: object, at_least: int) -> None:
    if num_outputs < at_least:
        raise ValueError(
            f"{type(loss).__name__} takes two outputs per record or more; the model gives "
            f"{num_outputs}: end it with one output per class"
        )


def is_true_class(scores_BK: Tensor, targets: Tensor) -> Tensor:
    """Where k = y. With one score per record: where the target is positive, so 0/1 and −1/+1 do."""
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
    """Both as (B, K), one target per output. (B,) against (B, 1) would broadcast to B² pairs."""
    num_outputs, num_targets = (math.prod(rows.shape[1:]) for rows in (outputs, targets))
    if num_outputs != num_targets:
        raise ValueError(
            f"{type(loss).__name__} takes one target per output; the model gives {num_outputs} "
            f"outputs per record, and there are {num_targets} targets"
        )
    return outputs.reshape(len(outputs), -1), targets.reshape(len(targets), -1)
