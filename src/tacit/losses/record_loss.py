"""What every loss is: one number a record, and their mean."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from tacit.losses.task import Task

if TYPE_CHECKING:
    from tacit.losses.weighted_sum import WeightedSum


class RecordLoss(abc.ABC):
    """ℓ(h, y) of each record by itself. Called, it gives the mean over the records given.

    A record's number depends on no other record, on no class count and on no statistic of the
    batch; else one record could move everyone's gradient, and no constant would hold.
    `a * X + b * Y` is a weighted sum of two of them.

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

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.per_record(outputs, targets).mean()

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
