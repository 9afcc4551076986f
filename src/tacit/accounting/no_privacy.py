"""When an ε is so large that it protects nobody, and the words for it."""

from __future__ import annotations

import math
from functools import lru_cache

from scipy.special import ndtri

from tacit.accounting.pld import gaussian_epsilon

NO_PRIVACY = "this is no privacy"
CERTAINTY = 0.99


@lru_cache(maxsize=64)
def epsilon_of_no_privacy(delta: float) -> float:
    """The ε that the Gaussian curve G_μ has at δ when its best test is within 1% of certainty.

    The best test of G_μ has the advantage max_α 1 − α − G_μ(α) = 2Φ(μ/2) − 1, which is 0.99 at
    μ = 2Φ⁻¹(0.995) = 5.15: one who knows all other records then tells whether a record took part
    and is wrong one time in 200, in either direction. At δ = 1e-5 that is ε = 34.5. Runs in use
    are far from it: ε = 8 at 1e-5 is an advantage of 0.60. A sampled run with the same ε may leave
    its best test somewhat less, or much less where a rare sample gives all away, but what it
    *promises* by (ε, δ) is no more than this.
    """
    mu = 2 * float(ndtri((1 + CERTAINTY) / 2))
    return gaussian_epsilon(1 / mu, delta)


def no_privacy(epsilon: float, delta: float) -> bool:
    """Whether (ε, δ) promises no more than a mechanism whose best test is 99% certain."""
    return epsilon >= epsilon_of_no_privacy(delta)


def no_privacy_note(epsilon: float, delta: float) -> str | None:
    """The sentence that a report must carry, or None where it need not."""
    if not no_privacy(epsilon, delta):
        return None
    size = f"{epsilon:.4g}" if math.isfinite(epsilon) else "infinite"
    return (
        f"{NO_PRIVACY}: epsilon {size} at delta {delta:g} is past "
        f"{epsilon_of_no_privacy(delta):.3g}, which a Gaussian mechanism has when a test tells "
        f"with an advantage of {CERTAINTY:.0%} whether a record took part"
    )
