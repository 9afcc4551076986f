"""Entries of the weights that hover within the noise are fixed, and no longer trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tacit.queries.bounded_gradient import trainable
from tacit.training.callbacks import Callback

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer


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
        self._forget()

    def active(self, model: nn.Module) -> Mapping[str, Tensor]:
        """The mask of each parameter that has frozen entries."""
        return {name: mask for name, mask in self._masks.items() if name in self._with_frozen}

    @property
    def share_frozen(self) -> float:
        """The share of all entries that are frozen. Waits for the device."""
        sizes = sum(mask.numel() for mask in self._masks.values())
        return sum(int((~mask).sum()) for mask in self._masks.values()) / max(sizes, 1)

    def on_begin(self, trainer: Trainer) -> None:
        self._forget()
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

    def _forget(self) -> None:
        self._steps = 0
        self._masks: dict[str, Tensor] = {}
        self._fixed: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._variance: dict[str, float] = {}
        self._with_frozen: set[str] = set()
