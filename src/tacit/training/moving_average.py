"""An exponential moving average of the weights: post-processing, so it is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MovingAverage:
    """w̄ ← d·w̄ + (1 − d)·w after each step, d = min(decay, (1 + t)/(10 + t)) at step t.

    w̄ begins as the weights after step 1, and the early cap lets it forget them  [De 2022, App. C].
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}; give a number from 0 up to, not including, 1")
        self.decay = decay
        self._steps = 0
        self._average: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Forget what was averaged: a run's average is of its own weights alone."""
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
        """Exchange the model's weights and the average; twice is nothing."""
        if not self._average:
            return
        for name, parameter in model.named_parameters():
            current = parameter.detach().clone()
            parameter.copy_(self._average[name])
            self._average[name] = current

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The average in the model for a while; its own weights return, whatever ends it."""
        self.swap(model)
        try:
            yield
        finally:
            self.swap(model)
