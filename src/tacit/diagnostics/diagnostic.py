"""A measurement that is repeated during a run, and what all measurements share."""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from rich.table import Table
from torch import Tensor, nn

from tacit.canvas import save, table_text
from tacit.losses.record_loss import losses_of
from tacit.losses.tailored import watched
from tacit.pytrees import call_model
from tacit.queries.bounded_gradient import Loss
from tacit.queries.record_overlap import share_among
from tacit.records import Records
from tacit.statistics.tracking import without_running_statistics
from tacit.training.callbacks import Callback

if TYPE_CHECKING:
    from tacit.training.run import Run
    from tacit.training.trainer import Trainer

Value = TypeVar("Value")


@dataclass(frozen=True)
class Point(Generic[Value]):
    """What was measured after `step` steps."""

    step: int
    epoch: float
    value: Value


@dataclass(eq=False, repr=False)
class Diagnostic(Callback, abc.ABC, Generic[Value]):
    """A callback that measures before the first step, after each epoch, and after the last step.

    Measuring changes neither the model nor the run. Subclasses define `measure`, `reads` (what is
    read from the records; empty if only released weights are read) and `draw`.

    Args:
        records: what to measure on. Given records are taken to be public. Without any, the private
            training records are read and **the results are not private**: the run's notes say so.
            The guarantee for the model itself is not touched.
        every: measure every so many steps, instead of after each epoch.
        max_records: read only so many of the records.

    `points` holds the measurements.

        norms = tacit.diagnostics.GradientNormHistory(public)
        tacit.Trainer(..., callbacks=[norms]).fit()
        norms.plot("norms.png")
    """

    records: Records | None = None
    _: KW_ONLY
    every: int | None = None
    max_records: int = 256
    points: list[Point[Value]] = field(default_factory=list, init=False)
    private: bool = field(default=False, init=False)
    reads: ClassVar[str]
    draw: ClassVar[Callable[..., None]]

    def __post_init__(self) -> None:
        for name in ("every", "max_records"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.points)} points, {self.notice})"

    @property
    def notice(self) -> str:
        if not self.reads:
            return "reads released weights only"
        return f"not private: reads {self.reads}"

    @abc.abstractmethod
    def measure(self, trainer: Trainer, records: Records) -> Value:
        """One measurement."""

    def plot(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Draw this run alone; `draw` draws several runs by name."""
        type(self).draw({"": self}, path, **options)

    def on_begin(self, trainer: Trainer) -> None:
        self.points = []
        self._measure(trainer, 0)
        self.private = bool(self.reads) and self._reads_training(trainer.sampler.records)

    def on_step(self, trainer: Trainer, step: int) -> None:
        if self._due(trainer, step) or step == trainer.sampler.steps:
            self._measure(trainer, step)

    def on_end(self, trainer: Trainer, run: Run) -> None:
        if self.private:
            name = type(self).__name__
            run.notes.append(
                f"{name} read {self.reads} of the training records: what it shows is not private, "
                "and epsilon does not cover it"
            )

    def _reads_training(self, training: Records) -> bool:
        if self.records is None:
            return True
        return share_among(first_of(self.records, self.max_records), training) > 0.5

    def _due(self, trainer: Trainer, step: int) -> bool:
        if self.every is not None:
            return step % self.every == 0
        # Rounding must not move the end of an epoch by a step.
        before, now = (trainer.plan.scheme.epochs(s) + 1e-9 for s in (step - 1, step))
        return math.floor(before) < math.floor(now)

    def _measure(self, trainer: Trainer, step: int) -> None:
        records = trainer.sampler.records if self.records is None else self.records
        some = first_of(records, self.max_records).to(trainer.sampler.device)
        devices = [some.device] if some.device.type == "cuda" else []
        # Measuring must not change the model: a running mean of these records would be a release.
        # Nor the run: dropout draws from PyTorch's generator, which is put back.
        with without_running_statistics(trainer.model), torch.random.fork_rng(devices=devices):
            value = self.measure(trainer, some)
        self.points.append(Point(step, trainer.plan.scheme.epochs(step), value))


def first_of(records: Records, count: int) -> Records:
    """The first `count` records."""
    if not len(records):
        raise ValueError("there are no records to measure on; give at least one")
    some = records.take(slice(count)).read()
    return Records(some.inputs, some.targets, records.num_classes, name=records.name)


def losses_on(model: nn.Module, loss: Loss, records: Records) -> Tensor:
    """The loss of each record, with a graph."""
    with torch.enable_grad(), watched(model, loss):
        return losses_of(loss, call_model(model, records.inputs), records.targets)


def gradients_of(
    value: Tensor, parameters: Mapping[str, nn.Parameter], *, create_graph: bool = False
) -> dict[str, Tensor]:
    """The gradient of `value` in each parameter, zero where it does not depend on one."""
    gradients = torch.autograd.grad(
        value, list(parameters.values()), create_graph=create_graph, materialize_grads=True
    )
    return dict(zip(parameters, gradients, strict=True))


def flattened(gradients: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Gradients by name as one vector, in float64."""
    return torch.cat([gradients[name].double().flatten() for name in names])


def shown_points(count: int, most: int = 4) -> list[int]:
    """Which of `count` measurements to draw: evenly spaced, the first and the last among them."""
    return sorted({round(i * (count - 1) / max(most - 1, 1)) for i in range(most)} if count else ())


def save_runs(figure: Any, path: str | os.PathLike[str], runs: Mapping[str, Diagnostic]) -> None:
    """Write the figure with the notices of its runs."""
    save(figure, path, "; ".join(sorted({run.notice for run in runs.values()})))


def text_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> str:
    """A table as text that begins with its title."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table_text(table, width)
