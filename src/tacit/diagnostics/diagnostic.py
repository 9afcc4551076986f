"""A measurement that is taken again and again while a run goes on."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import torch

from tacit.pytrees import tensors_of
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


class Diagnostic(Callback, abc.ABC, Generic[Value]):
    """Looks at the model before the first step, after each epoch or `every` steps, and at the end.

    `records` are what it looks at the model with, the first `max_records` of them. Given records
    are taken to be public; without any, the private training records are read, and **what is seen
    is not private**: the run's notes say so. The guarantee for the model is not touched.

    `reads` says what of the records is seen; empty where only released weights are.
    """

    reads: ClassVar[str]

    def __init__(
        self, records: Records | None = None, *, every: int | None = None, max_records: int = 256
    ) -> None:
        for name, value in (("every", every), ("max_records", max_records)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        self.records = records
        self.every = every
        self.max_records = max_records
        self.points: list[Point[Value]] = []
        self.private = False

    @property
    def notice(self) -> str:
        if not self.reads:
            return "reads released weights only"
        return f"not private: reads {self.reads}"

    @abc.abstractmethod
    def measure(self, trainer: Trainer, records: Records) -> Value:
        """Look once."""

    def on_begin(self, trainer: Trainer) -> None:
        self.points = []
        held = self.records is None or _same(self.records, trainer.sampler.records)
        self.private = bool(self.reads) and held
        self._look(trainer, 0)

    def on_step(self, trainer: Trainer, step: int) -> None:
        if self._due(trainer, step) or step == trainer.sampler.steps:
            self._look(trainer, step)

    def on_end(self, trainer: Trainer, run: Run) -> None:
        if self.private:
            name = type(self).__name__
            run.notes.append(
                f"{name} read {self.reads} of the training records: what it shows is not private, "
                "and epsilon does not cover it"
            )

    def _due(self, trainer: Trainer, step: int) -> bool:
        if self.every is not None:
            return step % self.every == 0
        # Rounding must not move the end of an epoch by a step.
        before, now = (trainer.plan.scheme.epochs(s) + 1e-9 for s in (step - 1, step))
        return math.floor(before) < math.floor(now)

    def _look(self, trainer: Trainer, step: int) -> None:
        records = trainer.sampler.records if self.records is None else self.records
        some = first_of(records, self.max_records).to(trainer.sampler.device)
        devices = [some.device] if some.device.type == "cuda" else []
        # To look must not change the model: a running mean of what is looked at would be a release.
        # Nor the run: dropout draws from PyTorch's generator, which is put back.
        with without_running_statistics(trainer.model), torch.random.fork_rng(devices=devices):
            value = self.measure(trainer, some)
        self.points.append(Point(step, trainer.plan.scheme.epochs(step), value))


def first_of(records: Records, count: int) -> Records:
    """The first `count` records."""
    if not len(records):
        raise ValueError("no records to look at; give at least one")
    some = records.take(slice(count))
    return Records(some.inputs, some.targets, records.num_classes, name=records.name)


def _same(given: Records, training: Records, rows: int = 64) -> bool:
    """Whether these are the training records under another name: as far as the first rows tell."""
    if given.shape != training.shape or not len(training):
        return False
    a, b = (tensors_of(records.take(slice(rows)).to("cpu").inputs) for records in (given, training))
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
