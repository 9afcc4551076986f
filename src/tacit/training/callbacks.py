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
        """The mean loss of the held-out records."""
        return self.metrics.loss

    def facts(self) -> dict[str, Any]:
        """Step, ε and the metrics, as plain values."""
        return {"step": self.step, "epsilon": self.epsilon, **self.metrics.facts()}


class Callback:
    """Called during a run: `on_begin`, `on_step`, `on_evaluation`, `on_end` and `on_error`.

    Override those that you need; all do nothing by default. One that has a state to be resumed with
    has `state_dict()` and `load_state_dict(state)` too (see `tacit.training.Stateful`). For
    example, to end a run early:

        class StopWhenGood(Callback):
            def on_evaluation(self, trainer, evaluation):
                if evaluation.accuracy > 0.9:
                    trainer.stop()
    """

    def on_begin(self, trainer: Trainer) -> None:
        """Before the first step."""

    def on_resume(self, trainer: Trainer, step: int) -> None:
        """After `on_begin`, when a run is resumed from its checkpoint at `step`."""

    def on_step(self, trainer: Trainer, step: int) -> None:
        """After each step; steps are counted from 1."""

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """After each evaluation on held-out records."""

    def on_end(self, trainer: Trainer, run: Run) -> None:
        """When the run has ended, also early."""

    def on_error(self, trainer: Trainer) -> None:
        """When the run has failed; the error is raised again."""


class ProgressBar(Callback):
    """Draws on standard error. Without a terminal it prints one line per evaluation.

    The loss shown is of held-out records: the loss of a private batch is private too, and
    to show it would be a release without a charge.

    Args:
        target_unit: what the targets of a regression were divided by before training; errors are
            shown in the target's own units.
    """

    def __init__(self, target_unit: float = 1.0) -> None:
        self._target_unit = target_unit
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

    def on_resume(self, trainer: Trainer, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        else:
            self._console.print(f"resumed at step {step}/{self._total}", highlight=False)

    def on_step(self, trainer: Trainer, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        metrics = evaluation.metrics.in_units(self._target_unit)
        figures = f"{metrics.text()}  ε {evaluation.epsilon:.3f}"
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

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "steps": self._steps, "average": dict(self._average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["decay"] != self.decay:
            raise ValueError(f"the average has decay {state['decay']}, not {self.decay}")
        self._steps, self._average = int(state["steps"]), dict(state["average"])

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


def _like(value: Any, stored: Any) -> Any:
    """What was stored, if it is of the value's type and shape."""
    same = type(stored) is type(value)
    if isinstance(value, Tensor):
        same = same and (stored.shape, stored.dtype) == (value.shape, value.dtype)
    if not same:
        raise ValueError("the entries of a parameter are not those of this model")
    return stored


class _Entries:
    """One parameter's entries: which are free, where the frozen ones stay, sums over the window."""

    def __init__(self, p: nn.Parameter) -> None:
        self.free = torch.ones_like(p, dtype=torch.bool, requires_grad=False)
        self.fixed = torch.zeros_like(p, requires_grad=False)
        self.any_frozen = False
        self.begin_window()

    def begin_window(self) -> None:
        self.gradients, self.weights = torch.zeros_like(self.fixed), torch.zeros_like(self.fixed)
        self.variance = 0.0

    def add(self, p: nn.Parameter, noise: float) -> None:
        if p.grad is not None:
            self.gradients += p.grad
        self.weights += p
        self.variance += noise**2

    def freeze(self, steps: int, tolerance: float) -> None:
        """Freeze what stayed within the noise, at its mean over the window."""
        new = (self.gradients.abs() <= tolerance * self.variance**0.5) & self.free
        if bool(new.any()):
            self.fixed.copy_(torch.where(new, self.weights / steps, self.fixed))
            self.free &= ~new
            self.any_frozen = True

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in vars(self).items():
            vars(self)[name] = _like(value, state[name])

    def restore(self, p: nn.Parameter) -> None:
        """Put frozen entries back: momentum or weight decay may have moved them."""
        if self.any_frozen:
            p.copy_(torch.where(self.free, p, self.fixed))


class Sparsification(Callback):
    """Freezes an entry when T released gradients of it have |Σ_t g̃_t| ≤ κ·(Σ_t s_t²)^(1/2).

    Without a gradient, Σ_t g̃_t is noise of just that standard deviation, so what stays within κ of
    it has shown no gradient beyond the noise. At κ = 1 each window freezes about two thirds of such
    entries. A frozen entry is set to its mean over the window, and stays there  [Nguyen 2023,
    Section 3.4, which speaks of the spread of the weights; gradients say the same for every
    optimizer]. Frozen entries are left out of gradients before their norms are taken, so less of
    the rest is clipped away, and they are released without noise, as zero.

    All of it is computed from what was released: post-processing, at no cost in privacy. Give one
    object to the query (`frozen=`) and to the Trainer (`callbacks=`).
    """

    def __init__(self, window: int = 100, tolerance: float = 1.0) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; give at least 1 step")
        if not 0 < tolerance < math.inf:
            raise ValueError(f"tolerance is {tolerance}; give a number above 0")
        self.window, self.tolerance = window, tolerance
        self._steps = 0
        self._entries: dict[str, _Entries] = {}

    def active(self, model: nn.Module) -> Mapping[str, Tensor]:
        """The mask of each parameter that has frozen entries."""
        return {name: e.free for name, e in self._entries.items() if e.any_frozen}

    @property
    def share_frozen(self) -> float:
        """The share of all entries that are frozen. Waits for the device."""
        masks = [e.free for e in self._entries.values()]
        return sum(int((~m).sum()) for m in masks) / max(sum(m.numel() for m in masks), 1)

    def on_begin(self, trainer: Trainer) -> None:
        self._steps = 0
        self._entries = {name: _Entries(p) for name, p in trainable(trainer.model).items()}

    def state_dict(self) -> dict[str, Any]:
        """Masks, and sums over the window: all of it is made of released gradients."""
        entries = {name: e.state_dict() for name, e in self._entries.items()}
        return {"window": self.window, "steps": self._steps, "entries": entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it, after `on_begin` has made the entries of the model."""
        entries, window = state["entries"], state["window"]
        if window != self.window or entries.keys() != self._entries.keys():
            raise ValueError("the windows or the parameters of Sparsification are others")
        for name, e in self._entries.items():
            e.load_state_dict(entries[name])
        self._steps = int(state["steps"])

    @torch.no_grad()
    def on_step(self, trainer: Trainer, step: int) -> None:
        self._steps += 1
        for name, p in trainable(trainer.model).items():
            entries = self._entries[name]
            entries.restore(p)
            entries.add(p, trainer.mechanism.noise_of.get(name, 0.0))
            if self._steps == self.window:
                entries.freeze(self.window, self.tolerance)
                entries.restore(p)
                entries.begin_window()
        self._steps %= self.window
