"""How noise is allocated to blocks, at one joint noise multiplier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Allocation(Protocol):
    """Chooses the standard deviation s_h of each block's noise at one joint multiplier z.

    Releasing all blocks at once is one Gaussian mechanism: dividing block h by s_h makes the
    noise white and the sensitivity (Σ_h (Δ_h/s_h)²)^(1/2), so the joint multiplier is
    z = (Σ_h (Δ_h / s_h)²)^(-1/2), whatever the s_h. All allocations cost the same privacy.
    An allocation is called in every step, and one with too little noise is refused.
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
    """z_g: the noise multiplier of the blocks, beside statistics of joint multiplier z_b.

    The step's multiplier z satisfies 1/z² = 1/z_g² + 1/z_b², so z_g = z·z_b/√(z_b² − z²). That is
    more noise than z, as the statistics cost privacy too. Without statistics, z_b = ∞ and z_g = z.
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
class Noise:
    """How much noise a run adds, and how it is shared out over the blocks.

    `multiplier` is the joint noise multiplier z. None, the default, calibrates it so that the
    planned steps just fit the budget. `allocation` chooses each block's share at that z.

        Trainer(..., noise=Noise(allocation=PerLayerNoise()))
    """

    multiplier: float | None = None
    allocation: Allocation = GlobalNoise()


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
            raise ValueError(f"shares are {self.shares}; give one positive number per block")

    def __call__(
        self, sensitivities: Sequence[float], sizes: Sequence[int], noise_multiplier: float
    ) -> list[float]:
        if len(self.shares) != len(sensitivities):
            raise ValueError(
                f"{len(self.shares)} shares for {len(sensitivities)} blocks; give one per block"
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
                f"{len(weights)} weights for {len(sizes)} blocks; give one positive weight per "
                "block"
            )
        amplitudes = [math.sqrt(w * max(n, 1)) for w, n in zip(weights, sizes, strict=True)]
        total = math.fsum(a * d for a, d in zip(amplitudes, sensitivities, strict=True))
        return [
            noise_multiplier * math.sqrt(total * d / a)
            for a, d in zip(amplitudes, sensitivities, strict=True)
        ]
