"""Gaussian DP: the limit that papers quote, noise over blocks, and where an ε is no privacy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import dp_accounting as dpa
import numpy as np
from scipy.special import ndtr, ndtri

from tacit.accounting.events import component_of
from tacit.accounting.plan import scheme_of
from tacit.accounting.pld import gaussian_epsilon
from tacit.budget import Relation
from tacit.errors import UnsupportedEvent, argument
from tacit.sampling.sampler import Sampler
from tacit.sampling.scheme import Scheme, Unit, accounted_relation


@dataclass(frozen=True)
class GaussianDpEstimate:
    """μ of the Gaussian curve G_μ that a run tends to: a limit theorem, NOT a guarantee."""

    mu: float
    formula: str
    approximate: bool = True

    def __float__(self) -> float:
        return self.mu

    def __call__(self, type_one: float | np.ndarray) -> np.ndarray:
        """G_μ(α) = Φ(Φ⁻¹(1 − α) − μ)."""
        return ndtr(ndtri(1 - np.asarray(type_one)) - self.mu)

    def epsilon(self, delta: float) -> float:
        """The ε at which G_μ has this δ; approximate as μ is."""
        if math.isinf(self.mu):
            return math.inf
        return gaussian_epsilon(1 / self.mu, delta) if self.mu > 0 else 0.0


def gaussian_dp_mu(
    noise_multiplier: float,
    sampling: Scheme | Sampler,
    steps: int,
    *,
    relation: Relation | None = None,
    unit: Unit = Unit.RECORD,
) -> GaussianDpEstimate:
    """The CLT figure that papers quote, marked approximate. Exact only without sampling.

    Poisson, add or remove: μ = q·√(T·(e^(1/z²) − 1))                                [Bu 2020]
    without replacement:    μ = p·√(2T·(e^(1/z²)·Φ(3/2z) + 3Φ(−1/2z) − 2)), p = m/N  [Dong 2022]
    no amplification:       μ = √E / z over E epochs, exact.
    """
    z, scheme = noise_multiplier, scheme_of(sampling)
    if not z > 0:
        raise ValueError(f"noise multiplier is {z}; give a number above 0")
    event = scheme.step_event(z, unit)
    p = component_of(event).probability
    replaced = accounted_relation(relation or Relation.ADD_OR_REMOVE_ONE, unit)
    with contextlib.suppress(OverflowError):
        if isinstance(event, dpa.GaussianDpEvent):
            mu = math.sqrt(scheme.num_events(steps)) / z
            return GaussianDpEstimate(mu, "√E / z, without amplification", approximate=False)
        if isinstance(event, dpa.SampledWithoutReplacementDpEvent):
            bracket = math.exp(1 / z**2) * ndtr(1.5 / z) + 3 * ndtr(-0.5 / z) - 2
            formula = "(m/N)·√(2T·(e^(1/z²)Φ(3/2z) + 3Φ(−1/2z) − 2)) [Dong 2022]"
            return GaussianDpEstimate(p * math.sqrt(2 * steps * bracket), formula)
        if isinstance(event, dpa.PoissonSampledDpEvent) and replaced is not Relation.REPLACE_ONE:
            mu = p * math.sqrt(steps * math.expm1(1 / z**2))
            return GaussianDpEstimate(mu, "q·√(T·(e^(1/z²) − 1)) [Bu 2020]")
        raise UnsupportedEvent(
            f"papers give no limit formula for {scheme.describe()} under {replaced}; "
            "use trade_off, which is exact"
        )
    return GaussianDpEstimate(math.inf, "too little noise for the formula")


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
            raise ValueError(f"{argument('shares', '--layers')} is {shares}; give at least 1")
        return noise_multiplier / math.sqrt(shares)
    if not shares or not all(share > 0 and math.isfinite(share) for share in shares):
        raise ValueError(f"shares are {list(shares)}; give one number above 0 a block")
    return noise_multiplier / math.hypot(*shares)


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
