"""A sum over private records, released once with Gaussian noise of a given multiplier."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import dp_accounting


def check_release(
    noise_multiplier: float,
    public_size: int,
    generator: torch.Generator | None,
    seed: int | None,
) -> None:
    """Raise ValueError for what no release can be made with; before any record is read."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ValueError(f"noise_multiplier is {noise_multiplier!r}; give a finite number above 0")
    if public_size < 1:
        raise ValueError(f"public_size is {public_size}; declare a positive number of records")
    if generator is not None and seed is not None:
        raise ValueError("both generator and seed were given; give one of them")


def noisy_sum(
    total: Tensor, std: float, generator: torch.Generator | None, seed: int | None
) -> Tensor:
    """T + N(0, std²·I), from the operating system unless a generator or a seed is given.

    Of a seed the stream is this sum's own: gradients draw from the same number too, and the same
    noise on two releases cancels.
    """
    from tacit.noise import generator_for, seed_for

    if generator is None:
        own = None if seed is None else seed_for(seed, "a noisy sum")
        generator = generator_for(torch.device("cpu"), own)
    noise = torch.randn(
        total.shape, dtype=total.dtype, generator=generator, device=generator.device
    )
    return total + std * noise.cpu()


def gaussian_event(noise_multiplier: float) -> dp_accounting.GaussianDpEvent:
    """What the release costs; charge it under the relation that its sensitivity is for."""
    import dp_accounting

    return dp_accounting.GaussianDpEvent(noise_multiplier)
