"""Random generators for noise, and how noise is shared out over blocks."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_MT_WORDS = 624
_MT_STATE_OFFSET = 24  # bytes before the Mersenne words in torch's CPU generator state


def generator_for(device: torch.device | str, seed: int | None) -> torch.Generator:
    """A generator on `device`, from `seed` or, with None, from the operating system.

    `manual_seed` keeps only 32 bits on the CPU, few enough to try them all, so there the whole
    state of 624 words is drawn from the operating system instead.
    """
    generator = torch.Generator(device=device)
    if seed is not None:
        return generator.manual_seed(seed)
    generator.manual_seed(secrets.randbits(63))
    if generator.device.type == "cpu":
        words = np.frombuffer(secrets.token_bytes(4 * _MT_WORDS), dtype=np.uint32)
        state = generator.get_state()
        end = _MT_STATE_OFFSET + 8 * _MT_WORDS
        state[_MT_STATE_OFFSET:end] = torch.from_numpy(words.astype(np.uint64).view(np.uint8))
        generator.set_state(state)
    return generator


def seed_for(seed: int, what: str) -> int:
    """A seed of its own for each use of a seed: two streams from one number would be the same."""
    return int.from_bytes(hashlib.sha256(f"{what} {seed}".encode()).digest()[:6], "big")


class NoiseSource:
    """Standard normal draws on any device, one generator a device.

    A forked process or a copy that went on with the same generator would add the *same* noise to
    another gradient, and the difference of the two releases would be noiseless. So a fork and a
    copy draw a new state from the operating system, and refuse when the source was seeded.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self._pid = os.getpid()
        self._generators: dict[torch.device, torch.Generator] = {}

    def __getstate__(self) -> dict[str, object]:
        if self.seed is not None:
            raise TypeError(
                "a copy of a seeded noise source would repeat its noise; make a new one with a "
                "seed of its own"
            )
        return {"seed": None, "_pid": os.getpid(), "_generators": {}}

    def normal(self, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`size` independent draws of N(0, 1)."""
        return torch.randn(size, device=device, dtype=dtype, generator=self._generator(device))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device.type == "cuda" and device.index is None:
            # "cuda" and "cuda:0" are one device, and must not have one stream each.
            device = torch.device("cuda", torch.cuda.current_device())
        if os.getpid() != self._pid:
            if self.seed is not None:
                raise RuntimeError(
                    "a seeded noise source was carried into a forked process, where it would "
                    "repeat its parent's noise; make a new one there with a seed of its own"
                )
            self._generators.clear()
            self._pid = os.getpid()
        if device not in self._generators:
            # Two GPUs with one seed would draw one stream of noise twice.
            own = None if self.seed is None else self.seed + 1_000_003 * (device.index or 0)
            self._generators[device] = generator_for(device, own)
        return self._generators[device]


class Allocation(Protocol):
    """Chooses the standard deviation s_h of each block's noise at one joint multiplier z.

    Releasing all blocks at once is one Gaussian mechanism: dividing block h by s_h makes the
    noise white and the sensitivity (Σ_h (Δ_h/s_h)²)^(1/2), so the joint multiplier is
    z = (Σ_h (Δ_h / s_h)²)^(-1/2), whatever the s_h. All allocations cost the same privacy.
    """

    def __call__(
        self, sensitivities: Sequence[float], sizes: Sequence[int], noise_multiplier: float
    ) -> list[float]: ...


def joint_noise_multiplier(sensitivities: Sequence[float], stds: Sequence[float]) -> float:
    """z = (Σ_h (Δ_h / s_h)²)^(-1/2); blocks that no record can move (Δ_h = 0) do not count."""
    inverse_square = 0.0
    for sensitivity, std in zip(sensitivities, stds, strict=True):
        if sensitivity == 0:
            continue
        if std == 0:
            return 0.0
        inverse_square += (sensitivity / std) ** 2
    return math.inf if inverse_square == 0 else inverse_square**-0.5


def noise_left(noise_multiplier: float, taken: float) -> float:
    """z_g, for the blocks, beside statistics of joint multiplier z_b, such that together it is z.

    1/z² = 1/z_g² + 1/z_b², so z_g = z·z_b/√(z_b² − z²): more noise than z, as the statistics tell
    something too. Without statistics z_b = ∞, and z_g is z itself.
    """
    if math.isinf(taken) or noise_multiplier == 0:
        return noise_multiplier
    if not taken > noise_multiplier:
        times = noise_multiplier / taken if taken else math.inf
        raise ValueError(
            f"the statistics alone have a noise multiplier of {taken:.4g}, and the whole step is "
            f"planned with {noise_multiplier:.4g}, which leaves nothing for the gradient; give "
            f"them more than {times:.3g} times the noise (AdaptiveNorm(count_noise=...)), a larger "
            "batch, or fewer blocks"
        )
    gap = math.sqrt((taken - noise_multiplier) * (taken + noise_multiplier))
    return noise_multiplier * taken / gap


@dataclass(frozen=True)
class GlobalNoise:
    """The same standard deviation everywhere: s = z·(Σ_h Δ_h²)^(1/2)."""

    def __call__(
        self, sensitivities: Sequence[float], sizes: Sequence[int], noise_multiplier: float
    ) -> list[float]:
        std = noise_multiplier * math.sqrt(math.fsum(d * d for d in sensitivities))
        return [std] * len(sensitivities)


@dataclass(frozen=True)
class PerLayerNoise:
    """Noise in proportion to sensitivity: s_h = z·√L·Δ_h, L the number of blocks with Δ_h > 0."""

    def __call__(
        self, sensitivities: Sequence[float], sizes: Sequence[int], noise_multiplier: float
    ) -> list[float]:
        num_blocks = sum(d > 0 for d in sensitivities)
        return [noise_multiplier * math.sqrt(num_blocks) * d for d in sensitivities]


@dataclass(frozen=True)
class SharedNoise:
    """s_h = Δ_h·σ/p_h, with σ = z·(Σ_j p_j²)^(1/2): block h takes the share p_h² of the privacy.

    Layerwise clipping with noise σ/p_h in place of σ is ⊗_h G_{p_h/σ} = G_{√(Σ p_h²)/σ}
    [Nguyen 2023, Section 3.2], so its joint multiplier is z = σ/√(Σ p_h²). Equal shares are
    `PerLayerNoise`: σ = z·√L.
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", tuple(float(p) for p in self.shares))
        if not self.shares or not all(0 < p < math.inf for p in self.shares):
            raise ValueError(f"shares are {self.shares}; give one positive number a block")

    def __call__(
        self, sensitivities: Sequence[float], sizes: Sequence[int], noise_multiplier: float
    ) -> list[float]:
        if len(self.shares) != len(sensitivities):
            raise ValueError(
                f"{len(self.shares)} shares for {len(sensitivities)} blocks; give one a block"
            )
        moved = [p for p, d in zip(self.shares, sensitivities, strict=True) if d > 0]
        sigma = noise_multiplier * math.sqrt(math.fsum(p * p for p in moved))
        return [sigma * d / p for p, d in zip(self.shares, sensitivities, strict=True)]


@dataclass(frozen=True)
class OptimisedNoise:
    """The s_h that minimise Σ_h w_h·n_h·s_h² at the joint multiplier z (n_h = size of block h).

    With a_h = √(w_h·n_h), Lagrange gives s_h² = z²·Δ_h/a_h·Σ_j a_j Δ_j. The weights are public:
    1 (default) asks for the least total noise power; one over a block's usual squared signal
    asks for the best signal-to-noise ratio.
    """

    weights: tuple[float, ...] | None = None

    def __call__(
        self, sensitivities: Sequence[float], sizes: Sequence[int], noise_multiplier: float
    ) -> list[float]:
        weights = self.weights or (1.0,) * len(sizes)
        if len(weights) != len(sizes) or not all(0 < w < math.inf for w in weights):
            raise ValueError(
                f"{len(weights)} weights for {len(sizes)} blocks; give one positive weight a block"
            )
        amplitudes = [math.sqrt(w * max(n, 1)) for w, n in zip(weights, sizes, strict=True)]
        total = math.fsum(a * d for a, d in zip(amplitudes, sensitivities, strict=True))
        return [
            noise_multiplier * math.sqrt(total * d / a)
            for a, d in zip(amplitudes, sensitivities, strict=True)
        ]
