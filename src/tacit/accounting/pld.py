"""Events to privacy loss distributions: the ε that Tacit reports.

Each part of a composition has a dominating pair (P, Q), discretised so that δ is never
under-estimated ("connect the dots" [Doroshenko 2022]); composition convolves [Koskela 2020]. z is
the noise's standard deviation over the sensitivity Δ under the relation.

Gaussian:             N(1, z²) against N(0, z²), under either relation.
Poisson, add/remove:  (1−q)·N(0, z²) + q·N(1, z²) against N(0, z²), both ways [Zhu 2022].
Poisson, replace:     (1−q)·N(0) + q·N(½) against (1−q)·N(0) + q·N(−½), variance z².
    Proof. Given the others, the two outputs are (1−q)N(0) + qN(g) and (1−q)N(0) + qN(g'),
    where ‖g‖, ‖g'‖ ≤ Δ/2. Take any test S and write a = N(0)(S). By Neyman and Pearson
    N(g)(S) ≤ Φ(Φ⁻¹(a) + Δ/2s) and N(g')(S) ≥ Φ(Φ⁻¹(a) − Δ/2s), and the half-line attains
    both at once for g = Δ/2, g' = −Δ/2. So that pair dominates, in any dimension.
Without replacement, replace: C_p(G_{1/z}), p = m/N [Dong 2022, Thm 4.1]; see `_subset_loss`.
Revealed sample:      with probability p the Gaussian pair, else no loss.

dp-accounting has no public way to read the masses of a distribution: `masses` is the one place
that uses its private names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as dpa_pld
from scipy.special import log_ndtr, ndtr

from tacit.accounting.events import Component, components_of, refuse
from tacit.budget import Relation
from tacit.sampling.mini_sets import RevealedSampleDpEvent

PrivacyLoss: TypeAlias = dpa_pld.PrivacyLossDistribution

_TAIL_DEVIATIONS = 11.0  # N(0, 1) beyond this has mass 2e-28
_MAX_POINTS = 4_000_000
LEAST_NOISE, _LEAST_ALONE = 1e-3, 1e-100


@dataclass(frozen=True)
class Grid:
    """How fine the grid is: points over one step's reach, and over its standard deviation.

    Any grid gives a valid upper bound of δ. The relative excess of ε falls with the square of
    `points_per_deviation`, about 1e-5 at 200; where `points` is the limit (large noise and a tiny
    rate) it can be some percent of a very small ε.
    """

    points: int
    points_per_deviation: int


FINE = Grid(points=100_000, points_per_deviation=200)
COARSE = Grid(points=8_000, points_per_deviation=40)


def privacy_loss(
    event: dpa.DpEvent,
    relation: Relation,
    grid: Grid = FINE,
    interval: float | None = None,
) -> PrivacyLoss | None:
    """The composed privacy loss distribution of `event`, or None when it is not private at all.

    Its grid step is `interval`, or the one that suits the event.
    """
    parts = components_of(event)
    if not_private(parts):
        return None
    interval = interval or grid_step(parts, grid)
    try:
        return _composed_loss(parts, relation, interval)
    except OverflowError:  # losses in the thousands, on this grid: counted as no noise
        return None


def _composed_loss(parts: Counter[Component], relation: Relation, interval: float) -> PrivacyLoss:
    total = dpa_pld.identity(value_discretization_interval=interval)
    for part, count in parts.items():
        if part.is_gaussian:
            # T Gaussians are one of multiplier z / √T: exact, and no convolution is needed.
            loss = _gaussian(part.noise_multiplier / math.sqrt(count), interval)
        else:
            loss = _sampled_part(part, relation, interval)
            loss = loss.self_compose(count) if count > 1 else loss
        total = total.compose(loss)
    return total


def not_private(parts: Iterable[Component]) -> bool:
    """Whether some part gives everything away.

    Noise so small that losses overflow counts as none, which is sound: ε = ∞ is never too small.
    An unsampled Gaussian is computed in closed form, so it may have less noise.
    """
    return any(
        part.noise_multiplier < (_LEAST_ALONE if part.is_gaussian else LEAST_NOISE)
        for part in parts
    )


def gaussian_multiplier(event: dpa.DpEvent) -> float | None:
    """z of the one Gaussian that the whole event amounts to, where it has no sampling; else None.

    Gaussians compose to (Σ 1/z²)^(-1/2), exactly.
    """
    parts = components_of(event)
    if not parts or not_private(parts) or not all(part.is_gaussian for part in parts):
        return None
    return math.fsum(count / part.noise_multiplier**2 for part, count in parts.items()) ** -0.5


def gaussian_epsilon(z: float, delta: float) -> float:
    """The ε at which N(1, z²) against N(0, z²) has this δ, by bisection from above."""
    low, high = 0.0, 1.0
    while gaussian_profile(np.array(high), z) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high and high > 1e-12:
        middle = (low + high) / 2
        inside = gaussian_profile(np.array(middle), z) <= delta
        low, high = (low, middle) if inside else (middle, high)
    return high


def num_convolutions(event: dpa.DpEvent) -> int:
    """How many steps are composed numerically; unsampled Gaussians are composed in closed form."""
    return sum(1 if part.is_gaussian else count for part, count in components_of(event).items())


def grid_step(parts: Counter[Component], grid: Grid = FINE) -> float:
    """A grid step, a power of two, that suits the loss's own scale.

    A fixed step is too coarse for large noise (the rounding of thousands of tiny losses adds
    up) and runs out of memory for small noise. With p the chance of taking part, one step's loss
    reaches r = 11/z + 1/2z²; its second moment is at most p·r² and about p²·(e^(1/z²) − 1).
    Rounding N steps to a grid h adds a variance of about N·h²/6 to a total of V, so h follows
    √(V/N).
    """
    applications, variance, drift, longest = 0, 0.0, 0.0, 0.0
    for part, count in parts.items():
        z, p, repeats = part.noise_multiplier, part.probability, count
        if part.is_gaussian:
            z, repeats = z / math.sqrt(count), 1
        reach = _TAIL_DEVIATIONS / z + 0.5 / z**2
        p_squared = p if isinstance(part.event, RevealedSampleDpEvent) else p * p
        divergence = p_squared * math.expm1(min(1 / z**2, 700.0))
        spread, mean = min(p * reach**2, divergence), min(p * reach, divergence)
        if p == 1:
            spread, mean = 1 / z**2, 0.5 / z**2
        applications += repeats
        variance += repeats * spread
        drift += repeats * mean
        longest = max(longest, reach)
    if applications == 0:
        return 1e-4
    whole = 2 * (_TAIL_DEVIATIONS * math.sqrt(variance) + drift + longest)
    step = max(
        math.sqrt(variance / applications) / grid.points_per_deviation,
        longest / grid.points,
        whole / _MAX_POINTS,
    )
    return 2.0 ** math.floor(math.log2(step))


@lru_cache(maxsize=16)
def _gaussian(z: float, interval: float) -> PrivacyLoss:
    return dpa_pld.from_gaussian_mechanism(z, value_discretization_interval=interval)


@lru_cache(maxsize=16)
def _sampled_part(part: Component, relation: Relation, interval: float) -> PrivacyLoss:
    z, event = part.noise_multiplier, part.event
    if isinstance(event, dpa.PoissonSampledDpEvent):
        replace = relation is Relation.REPLACE_ONE
        # dp-accounting's REPLACE_ONE has means +1 and −1: in units of Δ/2 the noise is 2z.
        return dpa_pld.from_gaussian_mechanism(
            2 * z if replace else z,
            sampling_prob=part.probability,
            value_discretization_interval=interval,
            neighboring_relation=dpa.NeighboringRelation.REPLACE_ONE
            if replace
            else dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
        )
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent) and relation is Relation.REPLACE_ONE:
        return _subset_loss(z, part.probability, interval)
    if isinstance(event, RevealedSampleDpEvent):
        nothing = dpa_pld.identity(value_discretization_interval=interval)
        return _gaussian(z, interval).compute_mixture(nothing, part.probability)
    raise refuse(event, relation)


def gaussian_profile(epsilon: np.ndarray, z: float) -> np.ndarray:
    """δ(ε) = Φ(1/2z − εz) − e^ε Φ(−1/2z − εz) of N(1, z²) against N(0, z²)  [Balle 2018]."""
    upper = ndtr(0.5 / z - epsilon * z)
    lower = np.exp(np.minimum(epsilon + log_ndtr(-0.5 / z - epsilon * z), 0.0))
    return np.clip(upper - lower, 0.0, 1.0)


def _subset_loss(z: float, probability: float, interval: float) -> PrivacyLoss:
    """The privacy loss of C_p(G_{1/z}), p the chance of being drawn without replacement.

    Profile: δ(ε) = p·δ_G(log(1 + (e^ε − 1)/p)) for ε ≥ 0, and the trade-off function is
    symmetric [Dong 2022, Def. 4.2; Balle 2018, Thm 9].
    """
    reach = _TAIL_DEVIATIONS / z + 0.5 / z**2
    # log(1 + (e^ε − 1)/p) = reach, solved for ε.
    largest = math.log1p(probability * math.expm1(reach)) if reach < 700 else reach

    def profile(epsilons: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            inner = np.log1p(np.expm1(epsilons) / probability)
        inner = np.where(epsilons > 700, epsilons - math.log(probability), inner)
        return probability * gaussian_profile(inner, z)

    return symmetric_loss(profile, largest, interval)


def symmetric_loss(
    profile: Callable[[np.ndarray], np.ndarray], largest: float, interval: float
) -> PrivacyLoss:
    """The losses of the symmetric curve with profile δ(ε), connected at ε = 0, h, … `largest`.

    Symmetry means P(−l) = e^(−l)·P(l), so only ε ≥ 0 is differenced, where δ is small and its
    rounding is too; differencing δ near 1 would lose eight digits.
    """
    num = math.ceil(largest / interval) + 1
    epsilons = np.arange(num + 1) * interval
    deltas = np.minimum.accumulate(profile(epsilons))
    # p_i for the points 1 … n as in the connected-dots profile with mass at 0 left open.
    differences = np.diff(deltas)
    positive = np.empty(num)
    positive[:-1] = differences[1:] - differences[:-1] * math.exp(interval)
    positive[:-1] /= math.expm1(interval)
    positive[-1] = differences[-1] / math.expm1(-interval)
    positive = np.maximum(positive, 0.0)
    negative = positive * np.exp(-epsilons[1:])
    infinity = float(deltas[-1])
    centre = max(0.0, 1.0 - math.fsum(positive) - math.fsum(negative) - infinity)
    probabilities = np.concatenate([negative[::-1], [centre], positive])
    pmf = pld_pmf.DensePLDPmf(interval, -num, probabilities, infinity, pessimistic_estimate=True)
    return PrivacyLoss(pmf)


_NEGLIGIBLE = 1e-13  # losses above the point with this tail are left to the last tangent
# All terms below are positive, so that rounding is relative; this is many times its worst.
_RELATIVE_ROUNDING = 1e-9


def profile_of(loss: PrivacyLoss, count: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """(ε, δ(ε)) for up to 2·count values of ε ≥ 0, the larger δ of the two directions at each.

    δ(ε) = Σ_{l > ε} P(l)·(1 − e^(ε−l)) + P(∞), rounded up. Between two values the curve is held
    by their tangents alone, which is a lower bound; half of the values are evenly spaced and half
    geometrically, on the grid of the losses, where the curve has its corners.
    """
    directions = masses(loss)
    step = directions[0][0]
    tails = [np.cumsum(probs[::-1])[::-1] for _, _, probs, _ in directions]
    lasts = [
        lowest + int(np.count_nonzero(tail > _NEGLIGIBLE))
        for (_, lowest, _, _), tail in zip(directions, tails, strict=True)
    ]
    last = max(1, *lasts)
    even = np.linspace(0, last, min(count, last + 1)).round()
    indices = np.union1d(even, np.geomspace(1, last, count).round())
    deltas = np.maximum.reduce([_deltas(indices, *direction) for direction in directions])
    return indices * step, np.minimum(deltas * (1 + _RELATIVE_ROUNDING), 1.0)


def masses(loss: PrivacyLoss) -> list[tuple[float, int, np.ndarray, float]]:
    """(grid step, index of the first loss, masses, mass at infinity), one or two directions."""
    distinct = {id(pmf): pmf.to_dense_pmf() for pmf in (loss._pmf_remove, loss._pmf_add)}
    return [
        (
            pmf._discretization,
            int(pmf._lower_loss),
            np.asarray(pmf._probs, dtype=np.float64),
            float(pmf._infinity_mass),
        )
        for pmf in distinct.values()
    ]


def _deltas(
    indices: np.ndarray, step: float, lowest: int, probs: np.ndarray, infinity: float
) -> np.ndarray:
    """δ at ε = step·indices, in one pass from above in which nothing is subtracted.

    With S(ε) = Σ_{l > ε} P(l)·e^(ε−l) and D(ε) = Σ_{l > ε} P(l)·(1 − e^(ε−l)), going down from b
    to a: S(a) = e^(a−b)·S(b) + Σ_{a < l ≤ b} P(l)·e^(a−l), and D(a) = D(b) + (1 − e^(a−b))·S(b)
    + Σ_{a < l ≤ b} P(l)·(1 − e^(a−l)).
    """
    losses = np.arange(lowest, lowest + len(probs), dtype=np.float64)
    starts = np.searchsorted(losses, indices, side="right")
    first = int(starts[0])
    block = np.searchsorted(indices, losses[first:], side="left") - 1
    below = step * (indices[block] - losses[first:])
    kept = np.bincount(block, probs[first:] * np.exp(below), minlength=len(indices))
    gained = np.bincount(block, probs[first:] * -np.expm1(below), minlength=len(indices))
    gaps = step * np.diff(indices, append=indices[-1])
    decay, lost = np.exp(-gaps), -np.expm1(-gaps)
    deltas = np.empty(len(indices))
    shared, total = 0.0, infinity
    for k in range(len(indices) - 1, -1, -1):
        total += lost[k] * shared + gained[k]
        shared = decay[k] * shared + kept[k]
        deltas[k] = total
    return deltas
