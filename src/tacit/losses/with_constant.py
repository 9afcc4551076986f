"""A loss of one's own, with the constant that its author answers for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tacit.losses.shapes import positive
from tacit.losses.task import Task, task_of


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
