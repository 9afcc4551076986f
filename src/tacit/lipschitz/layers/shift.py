"""Channels moved against each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.lipschitz.bounds import Parameterless


class Shift(nn.Module, Parameterless):
    """Each channel moves by its own offset of a k₁ × … × k_r window: a convolution of norm 1.

    The offsets are dealt to runs of channels, evenly. Round a torus (`circular`) it is a
    permutation; with zeros what moves over the border is lost, and nothing grows  [Wu 2018].
    """

    exact = True

    def __init__(self, window: Sequence[int], padding_mode: str = "circular") -> None:
        super().__init__()
        if padding_mode not in ("circular", "zeros"):
            raise ValueError(f"padding_mode is {padding_mode!r}; use circular or zeros")
        self.window, self.padding_mode = tuple(window), padding_mode
        reach = [range(-((k - 1) // 2), k // 2 + 1) for k in self.window]
        self.offsets = list(itertools.product(*reach))

    def forward(self, x: Tensor) -> Tensor:
        channels, count = x.shape[1], len(self.offsets)
        # Rounded to nearest, so that with few channels the middle of the window is not left out.
        ends = [(2 * channels * i + count) // (2 * count) for i in range(count + 1)]
        runs = x.split([b - a for a, b in itertools.pairwise(ends)], dim=1)
        pairs = zip(runs, self.offsets, strict=True)
        return torch.cat([self._move(run, by) for run, by in pairs if run.shape[1]], dim=1)

    def _move(self, run: Tensor, by: tuple[int, ...]) -> Tensor:
        if not any(by):
            return run
        if self.padding_mode == "circular":
            return run.roll(by, tuple(range(2, 2 + len(by))))
        # Padding on one side and cropping on the other; no more than there is.
        steps = [max(-n, min(step, n)) for step, n in zip(by, run.shape[2:], strict=True)]
        return F.pad(run, [amount for step in reversed(steps) for amount in (step, -step)])

    def extra_repr(self) -> str:
        return f"{self.window}, {self.padding_mode}"
