"""What every loss is: one number a record, and their mean."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from tacit.losses.task import Task
from tacit.pytrees import Tree, logits_of, tensors_of

if TYPE_CHECKING:
    from tacit.losses.weighted_sum import WeightedSum


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
        from tacit.losses.weighted_sum import weighted_sum

        return weighted_sum([(float(weight), self)])

    __rmul__ = __mul__

    def __add__(self, other: RecordLoss) -> WeightedSum:
        from tacit.losses.weighted_sum import weighted_sum

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
