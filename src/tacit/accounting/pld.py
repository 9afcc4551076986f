"""Events to privacy loss distributions: the ε that Tacit reports.

Each step's dominating pair is put on a grid so that δ is never under-estimated
(`dominating_pairs` has the pairs and the proof); steps compose by adding their losses, which is a
convolution of their masses [Koskela 2020], here by the fast Fourier transform.

`epsilon_of` is for one δ, however small, and `privacy_loss` for whole curves; `composition` says
how steps are composed and what that costs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import dp_accounting as dpa
import numpy as np

from tacit.accounting.composition import (
    CURVE_TAIL,
    FINE,
    Grid,
    Moments,
    PrivacyLoss,
    Steps,
    composed,
    epsilon_one_way,
    grid_step,
    sketches_of,
)
from tacit.accounting.dominating_pairs import (
    Losses,
    Mixture,
    Pair,
    Replaced,
    Sampled,
    Subset,
    gaussian_profile,
    mirrored,
    truncated,
)
from tacit.accounting.events import Component, components_of, refuse
from tacit.budget import Relation
from tacit.sampling.mini_sets import RevealedSampleDpEvent

LEAST_NOISE, _LEAST_ALONE = 1e-3, 1e-100


def steps_of(parts: Counter[Component], relation: Relation) -> Steps:
    """Each part's dominating pair and how often; T Gaussians are one of multiplier z / √T."""
    steps = [(_pair_of(p, relation), count) for p, count in parts.items() if not p.is_gaussian]
    alone = [count / p.noise_multiplier**2 for p, count in parts.items() if p.is_gaussian]
    return steps + ([(Sampled(math.fsum(alone) ** -0.5, 1.0), 1)] if alone else [])


def _pair_of(part: Component, relation: Relation) -> Pair:
    z, p, event = part.noise_multiplier, part.probability, part.event
    replaced = relation is Relation.REPLACE_ONE
    if isinstance(event, dpa.PoissonSampledDpEvent):
        return Replaced(z, p) if replaced else Sampled(z, p)
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        kind = Replaced if replaced else Sampled
        return truncated(kind, z, p, event.dataset_size, event.truncated_batch_size)
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent) and replaced:
        return Subset(z, p)
    if isinstance(event, RevealedSampleDpEvent):
        return Mixture(((p, Sampled(z, 1.0)),))
    raise refuse(event, relation)


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


def epsilon_of(
    parts: Counter[Component], relation: Relation, delta: float, grid: Grid = FINE
) -> float:
    """The least ε with δ(ε) ≤ δ, rounded up. [Koskela 2020]"""
    if not_private(parts):
        return math.inf
    if not parts:
        return 0.0
    steps = steps_of(parts, relation)
    symmetric = all(pair.symmetric for pair, _ in steps)
    return max(
        epsilon_one_way(steps, reverse, delta, grid)
        for reverse in ((False,) if symmetric else (False, True))
    )


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
    steps = steps_of(parts, relation)
    interval = interval or curve_step(parts, relation, grid)
    ways = (False,) if all(pair.symmetric for pair, _ in steps) else (False, True)
    return composed(
        [
            (tuple(pair.losses(interval, CURVE_TAIL, way) for way in ways), count)
            for pair, count in steps
        ],
        interval,
    )


def curve_step(parts: Counter[Component], relation: Relation, grid: Grid = FINE) -> float:
    """The grid step that suits the whole curve of these parts."""
    steps = steps_of(parts, relation)
    if not steps:
        return 1e-4
    sketches = sketches_of(steps, CURVE_TAIL, reverse=False)
    log_tail = math.log(CURVE_TAIL)
    low, high, _ = Moments.of(sketches).ends(0.0, log_tail, log_tail)
    return grid_step(sketches, high - low, grid)


def symmetric_loss(
    profile: Callable[[np.ndarray], np.ndarray], largest: float, interval: float
) -> Losses:
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
    return mirrored(interval, np.concatenate([[0.0], positive]), float(deltas[-1]))


_NEGLIGIBLE = 1e-13  # losses above the point with this tail are left to the last tangent
# All terms below are positive, so that rounding is relative; this is many times its worst.
_RELATIVE_ROUNDING = 1e-9


def profile_of(loss: PrivacyLoss, count: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """(ε, δ(ε)) for up to 2·count values of ε ≥ 0, the larger δ of the two directions at each.

    δ(ε) = Σ_{l > ε} P(l)·(1 − e^(ε−l)) + P(∞), rounded up. Between two values the curve is held
    by their tangents alone, which is a lower bound; half of the values are evenly spaced and half
    geometrically, on the grid of the losses, where the curve has its corners.
    """
    step = loss[0].step
    lasts = [
        losses.first + int(np.count_nonzero(np.cumsum(losses.masses[::-1]) > _NEGLIGIBLE))
        for losses in loss
    ]
    last = max(1, *lasts)
    even = np.linspace(0, last, min(count, last + 1)).round()
    indices = np.union1d(even, np.geomspace(1, last, count).round())
    deltas = np.maximum.reduce([deltas_of(losses, indices) for losses in loss])
    return indices * step, np.minimum(deltas * (1 + _RELATIVE_ROUNDING), 1.0)


def deltas_of(losses: Losses, indices: np.ndarray) -> np.ndarray:
    """δ at ε = step·indices, in one pass from above in which nothing is subtracted.

    With S(ε) = Σ_{l > ε} P(l)·e^(ε−l) and D(ε) = Σ_{l > ε} P(l)·(1 − e^(ε−l)), going down from b
    to a: S(a) = e^(a−b)·S(b) + Σ_{a < l ≤ b} P(l)·e^(a−l), and D(a) = D(b) + (1 − e^(a−b))·S(b)
    + Σ_{a < l ≤ b} P(l)·(1 − e^(a−l)).
    """
    step, probs = losses.step, losses.masses
    points = np.arange(losses.first, losses.first + len(probs), dtype=np.float64)
    first = int(np.searchsorted(points, indices[0], side="right"))
    block = np.searchsorted(indices, points[first:], side="left") - 1
    below = step * (indices[block] - points[first:])
    kept = np.bincount(block, probs[first:] * np.exp(below), minlength=len(indices))
    gained = np.bincount(block, probs[first:] * -np.expm1(below), minlength=len(indices))
    gaps = step * np.diff(indices, append=indices[-1])
    decay, lost = np.exp(-gaps), -np.expm1(-gaps)
    deltas = np.empty(len(indices))
    shared, total = 0.0, losses.infinity
    for k in range(len(indices) - 1, -1, -1):
        total += lost[k] * shared + gained[k]
        shared = decay[k] * shared + kept[k]
        deltas[k] = total
    return deltas
