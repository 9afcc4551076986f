"""What clipping and noising a gradient block by block costs."""

from __future__ import annotations

import math
from collections.abc import Sequence


def layerwise_multiplier(noise_multiplier: float, shares: int | Sequence[float]) -> float:
    """The joint multiplier of L blocks: σ/√L, or σ/√(Σ_h p_h²) where block h has noise σ/p_h.

    Block h alone is G_{p_h/σ}-DP, and G_{p_1/σ} ⊗ … ⊗ G_{p_L/σ} = G_μ with
    μ = √(Σ_h p_h²)/σ  [Dong 2022, Cor. 3.3]. Sampling comes after: one sample is released as L
    blocks, so C_p is applied to G_μ once and never to each block.
    """
    if not noise_multiplier >= 0:
        raise ValueError(f"noise multiplier is {noise_multiplier}; give 0 or more")
    if isinstance(shares, int):
        if shares < 1:
            raise ValueError(f"{shares} blocks; give at least 1")
        return noise_multiplier / math.sqrt(shares)
    if not shares or not all(share > 0 and math.isfinite(share) for share in shares):
        raise ValueError(f"shares are {list(shares)}; give one number above 0 a block")
    return noise_multiplier / math.hypot(*shares)
