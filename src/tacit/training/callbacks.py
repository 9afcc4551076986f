"""What can be hung onto a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tacit.training.run import Run
    from tacit.training.trainer import Trainer


@dataclass(frozen=True)
class Evaluation:
    """How good the model was after `step` steps, and what had been spent by then.

    `epsilon` is a slight over-estimate, on a coarse grid, for progress bars and plots. It is never
    above the run's own.
    """

    step: int
    epsilon: float
    accuracy: float
    loss: float


class Callback:
    """Does nothing; a user's own overrides what it needs."""

    def on_begin(self, trainer: Trainer) -> None: ...

    def on_step(self, trainer: Trainer, step: int) -> None: ...

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None: ...

    def on_end(self, trainer: Trainer, run: Run) -> None: ...

    def on_error(self, trainer: Trainer) -> None: ...
