"""Accuracy on the way of a run, and seconds."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

import tacit
from tacit import Records
from tacit.statistics.tracking import evaluating
from tacit.training import Callback

AT_ONCE = 5_000


def looks_of(steps: int, evaluations: int) -> set[int]:
    """Steps after which records are looked at: evenly, and after the last."""
    return {round(steps * i / evaluations) for i in range(1, evaluations + 1)} - {0}


class Watch(Callback):
    """Accuracy after the steps `looks`, of the average where there is one; nothing else is asked.

    Its clocks run from when it is made: one on the wall, one of all the process's threads.
    """

    def __init__(self, records: Records, looks: set[int], mirrors: Tensor | None = None) -> None:
        self.records, self.looks, self.mirrors = records, looks, mirrors
        self.started = time.perf_counter()
        self.cpu_started = time.process_time()
        self.path: list[tuple[int, float, float, float]] = []

    def on_step(self, trainer: tacit.Trainer, step: int) -> None:
        if step not in self.looks:
            return
        average = trainer.moving_average
        if average is not None:
            average.swap(trainer.model)
        found = accuracy(trainer.model, self.records, self.mirrors)
        if average is not None:
            average.swap(trainer.model)
        worked = time.process_time() - self.cpu_started
        self.path.append((step, found, time.perf_counter() - self.started, worked))


@torch.no_grad()
def accuracy(model: nn.Module, records: Records, mirrors: Tensor | None = None) -> float:
    """Of the records; with `mirrors`, of the sum of their logits and their mirror images'."""
    right = torch.zeros((), dtype=torch.long, device=records.device)
    with evaluating(model):
        for start in range(0, len(records), AT_ONCE):
            rows = slice(start, start + AT_ONCE)
            logits = model(records.inputs[rows])
            if mirrors is not None:
                logits = logits + model(mirrors[rows])
            right += (logits.argmax(1) == records.targets[rows]).sum()
    return int(right) / len(records)
