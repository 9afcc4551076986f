"""What can be attached to a run: callbacks, a progress bar, an average and a mask of the weights.

All of it works on released weights and gradients, so it is post-processing and costs no privacy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from tacit.queries.bounded_gradient import trainable
from tacit.training.evaluation import Metrics

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
    """Called during a run. Override the methods that are needed; all do nothing by default.

    For example, to end a run early:

        class StopWhenGood(Callback):
            def on_evaluation(self, trainer, evaluation):
                if evaluation.accuracy > 0.9:
                    trainer.stop()
    """

    def on_begin(self, trainer: Trainer) -> None: ...

    def on_step(self, trainer: Trainer, step: int) -> None: ...

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None: ...

    def on_end(self, trainer: Trainer, run: Run) -> None: ...

    def on_error(self, trainer: Trainer) -> None: ...


class ProgressBar(Callback):
    """Draws on standard error. Without a terminal it prints one line per evaluation.

    The loss shown is of held-out records: the loss of a private batch is private too, and
    to show it would be a release without a charge.
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


class MovingAverage:
    """w̄ ← d·w̄ + (1 − d)·w after each step, d = min(decay, (1 + t)/(10 + t)) at step t.

    w̄ begins as the weights after step 1; the early cap makes their share vanish
    [De 2022, App. C].
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}; give at least 0 and less than 1")
        self.decay = decay
        self._steps = 0
        self._average: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        return f"MovingAverage(decay={self.decay:g})"

    def begin(self) -> None:
        """Start a new average: a run averages its own weights alone."""
        self._steps, self._average = 0, {}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        weights = {n: p.detach() for n, p in model.named_parameters()}
        if not self._average:
            self._average = {n: w.clone() for n, w in weights.items()}
        self._steps += 1
        decay = min(self.decay, (1 + self._steps) / (10 + self._steps))
        for name, weight in weights.items():
            self._average[name].lerp_(weight, 1 - decay)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange the model's weights and the average. A second call undoes the first."""
        if not self._average:
            return
        for name, parameter in model.named_parameters():
            current = parameter.detach().clone()
            parameter.copy_(self._average[name])
            self._average[name] = current

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The average is in the model inside the context; afterwards its own weights return."""
        self.swap(model)
        try:
            yield
        finally:
            self.swap(model)


class Sparsification(Callback):
    """Over T released gradients of an entry: frozen if |Σ_t g̃_t| ≤ κ·(Σ_t s_t²)^(1/2).

    Without a gradient, Σ_t g̃_t is noise of just that standard deviation, so what stays within κ of
    it has shown no gradient beyond the noise; at κ = 1 about two thirds of such entries are found
    in each window. A frozen entry is set to its mean over the window, and stays there  [Nguyen
    2023, Section 3.4, which speaks of the weights' spread; gradients say the same for every
    optimizer]. Whatever is frozen is left out of gradients before their norms are taken, so less
    is clipped away of the rest, and it is released without noise, as zero.

    All of it is computed from what was released: post-processing, at no cost in privacy. Give one
    object to the query (`frozen=`) and to the Trainer (`callbacks=`).
    """

    def __init__(self, window: int = 100, tolerance: float = 1.0) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; give at least 1 step")
        if not 0 < tolerance < math.inf:
            raise ValueError(f"tolerance is {tolerance}; give a number above 0")
        self.window, self.tolerance = window, tolerance
        self._reset()

    def active(self, model: nn.Module) -> Mapping[str, Tensor]:
        """The mask of each parameter that has frozen entries."""
        return {name: mask for name, mask in self._masks.items() if name in self._with_frozen}

    @property
    def share_frozen(self) -> float:
        """The share of all entries that are frozen. Waits for the device."""
        sizes = sum(mask.numel() for mask in self._masks.values())
        return sum(int((~mask).sum()) for mask in self._masks.values()) / max(sizes, 1)

    def on_begin(self, trainer: Trainer) -> None:
        self._reset()
        for name, p in trainable(trainer.model).items():
            self._masks[name] = torch.ones_like(p, dtype=torch.bool, requires_grad=False)
            self._fixed[name] = torch.zeros_like(p, requires_grad=False)
        self._start_window(trainer.model)

    @torch.no_grad()
    def on_step(self, trainer: Trainer, step: int) -> None:
        parameters = trainable(trainer.model)
        for name, p in parameters.items():
            if name in self._with_frozen:  # momentum or weight decay may have moved it
                p.copy_(torch.where(self._masks[name], p, self._fixed[name]))
            if p.grad is not None:
                self._gradients[name] += p.grad
            self._weights[name] += p
            self._variance[name] += trainer.mechanism.noise_of.get(name, 0.0) ** 2
        self._steps += 1
        if self._steps == self.window:
            self._freeze(parameters)
            self._start_window(trainer.model)

    def _freeze(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, p in parameters.items():
            within = self._gradients[name].abs() <= self.tolerance * self._variance[name] ** 0.5
            new = within & self._masks[name]
            if not bool(new.any()):
                continue
            self._fixed[name].copy_(
                torch.where(new, self._weights[name] / self._steps, self._fixed[name])
            )
            self._masks[name] &= ~new
            self._with_frozen.add(name)
            p.copy_(torch.where(self._masks[name], p, self._fixed[name]))

    def _start_window(self, model: nn.Module) -> None:
        self._steps = 0
        for name, p in trainable(model).items():
            self._gradients[name] = torch.zeros_like(p, requires_grad=False)
            self._weights[name] = torch.zeros_like(p, requires_grad=False)
            self._variance[name] = 0.0

    def _reset(self) -> None:
        self._steps = 0
        self._masks: dict[str, Tensor] = {}
        self._fixed: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._variance: dict[str, float] = {}
        self._with_frozen: set[str] = set()
