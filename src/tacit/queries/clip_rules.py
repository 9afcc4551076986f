"""From a record's norm to the scale of its gradient.

A rule proposes a scale, and `clip_scale` cuts it to C/‖g‖. So ‖s·g‖ ≤ C under every rule, as long
as a record's scale depends on its own norm and on public constants alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class ClipRule(Protocol):
    """Norms and the constant C to scales of at least 0, record by record.

    Rules are frozen and compared by value: what was recorded under one is not replayed under
    another.
    """

    def __call__(self, norms_B: Tensor, max_norm: float | Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Clip:
    """min(1, C/‖g‖): what is longer than C is cut, the rest is left alone.  [Abadi 2016, Alg. 1]"""

    def __call__(self, norms_B: Tensor, max_norm: float | Tensor) -> Tensor:
        return torch.ones_like(norms_B)


@dataclass(frozen=True)
class Normalise:
    """C/(‖g‖ + γ): every gradient gets a norm of nearly C, long or short.  [Bu 2022, AUTO-S]

    ‖s·g‖ = C·‖g‖/(‖g‖ + γ) ≤ C. Gradients far shorter than γ are all scaled by C/γ, so the
    shorter stays the shorter; γ = 0 is AUTO-V, which forgets sizes. Zero stays zero under both:
    norms come in as at least 1e-12 (see `clip_scale`), so nothing is divided by zero.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.stability < math.inf:
            raise ValueError(f"stability is {self.stability}; give 0 or a positive number")

    def __call__(self, norms_B: Tensor, max_norm: float | Tensor) -> Tensor:
        scale = max_norm / (norms_B + self.stability)
        return scale.clamp(max=torch.finfo(scale.dtype).max)  # infinity times a zero is not zero


CLIP = Clip()
