"""Clipping constants on the device, where a recorded step reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit.queries.engines.task import Task


@dataclass
class HeldConstants:
    """The norms and factors of a task as a tensor that a recording reads each time.

    A number would be recorded for good, and a step clipped to an old C under noise for a new one
    is not private. `in_force` is what the tensor holds.
    """

    held: Tensor
    in_force: tuple[float, ...]

    @classmethod
    def of(cls, task: Task, device: torch.device) -> tuple[HeldConstants, Task]:
        """The constants of the task, and the task with its constants read from there."""
        in_force = _numbers(task)
        held = _pinned(in_force).to(device)
        each, of_norms = held.unbind(), len(task.norms)
        factors = None if task.factors is None else each[of_norms:]
        return cls(held, in_force), replace(task, norms=each[:of_norms], factors=factors)

    def follow(self, task: Task) -> None:
        """Hold the task's constants from now on; nothing is copied when they are the same."""
        now = _numbers(task)
        if now != self.in_force:
            self.held.copy_(_pinned(now), non_blocking=True)
            self.in_force = now


def _numbers(task: Task) -> tuple[float, ...]:
    return tuple(float(number) for number in (*task.norms, *(task.factors or ())))


def _pinned(numbers: tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).pin_memory()
