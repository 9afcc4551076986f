"""A live progress bar: steps, held-out metrics, ε spent so far."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tacit.training.callbacks import Callback, Evaluation

if TYPE_CHECKING:
    from tacit.training.run import Run
    from tacit.training.trainer import Trainer


class ProgressBar(Callback):
    """Draws on standard error; off a terminal it prints a plain line an evaluation.

    The loss shown is of held-out records: the loss of a private batch is private too, and
    showing it would be a release that nobody paid for.
    """

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None

    def on_begin(self, trainer: Trainer) -> None:
        self._total = trainer.sampler.steps
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
        )
        self._bar.start()
        self._task = self._bar.add_task("training", total=self._total, figures="")

    def on_step(self, trainer: Trainer, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        figures = f"{evaluation.metrics.text()}  ε {evaluation.epsilon:.3f}"
        if self._bar is not None:
            self._bar.update(self._task, figures=figures)
        else:
            line = f"step {evaluation.step}/{self._total}  {figures}"
            self._console.print(line, highlight=False)

    def on_end(self, trainer: Trainer, run: Run) -> None:
        self._close()

    def on_error(self, trainer: Trainer) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
