"""What can be hung onto a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tacit.training.evaluate import Metrics

if TYPE_CHECKING:
    from tacit.training.run import Run
    from tacit.training.trainer import Trainer


@dataclass(frozen=True)
class Evaluation:
    """The model's metrics on held-out records after `step` steps, and ε spent by then.

    `epsilon` is a slight over-estimate, on a coarse grid, for progress bars and plots. It is never
    above the run's own.
    """

    step: int
    epsilon: float
    metrics: Metrics

    @property
    def accuracy(self) -> float | None:
        """None where the task has no classes."""
        return self.metrics.accuracy

    @property
    def loss(self) -> float | None:
        return self.metrics.loss

    def facts(self) -> dict[str, Any]:
        """Step, ε and the metrics, as plain values."""
        return {"step": self.step, "epsilon": self.epsilon, **self.metrics.facts()}


class Callback:
    """Does nothing; a user's own overrides what it needs."""

    def on_begin(self, trainer: Trainer) -> None: ...

    def on_step(self, trainer: Trainer, step: int) -> None: ...

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None: ...

    def on_end(self, trainer: Trainer, run: Run) -> None: ...

    def on_error(self, trainer: Trainer) -> None: ...
