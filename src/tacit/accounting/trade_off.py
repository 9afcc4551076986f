"""Trade-off curves: what a tester who wants to spot one record can reach (f-DP)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import dp_accounting as dpa
import numpy as np
from scipy.special import ndtr, ndtri

from tacit.accounting.accountant import ROUNDING_A_STEP, run_event, scheme_of
from tacit.accounting.pld import (
    PrivacyLoss,
    gaussian_multiplier,
    gaussian_profile,
    num_convolutions,
    privacy_loss,
)
from tacit.accounting.profile import profile_of
from tacit.budget import Relation
from tacit.sampling.sampler import Sampler
from tacit.sampling.schemes import Scheme, Unit, accounted_relation

_STEEPEST = 690.0  # e^ε beyond is out of a double's range, and α·e^ε > 1 for every α that is not


@dataclass(frozen=True)
class Release:
    """An event and the relation it is accounted under (None: the same under both)."""

    event: dpa.DpEvent
    relation: Relation | None


@dataclass(frozen=True, eq=False)
class TradeOff:
    """f(α): the least type II error of any test whose type I error is at most α.  [Dong 2022]

    A symmetric curve, given by points (ε, δ) of a privacy profile, 0 ≤ ε ascending:
    f(α) = max over the points of max(1 − δ − e^ε·α, e^(−ε)·(1 − δ − α), 0)  [Dong 2022, Prop. 2.5].
    Each point is a line that the true curve is above, so for any points whose δ is not too small
    **f is never above the truth**: no test does better than it says.

    `relation` is the one the curve is for, where it is for one. `factors` is what it was composed
    of, so that a tensor product can compose that and not its outline.
    """

    epsilons: np.ndarray
    deltas: np.ndarray
    relation: Relation | None = None
    factors: tuple[tuple[Release | TradeOff, int], ...] = ()
    _slopes: np.ndarray = field(init=False, repr=False)
    _tops: np.ndarray = field(init=False, repr=False)
    _corners: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        epsilons = np.atleast_1d(np.asarray(self.epsilons, dtype=np.float64))
        deltas = np.atleast_1d(np.asarray(self.deltas, dtype=np.float64))
        if epsilons.shape != deltas.shape or epsilons.ndim != 1 or len(epsilons) == 0:
            raise ValueError(
                f"{epsilons.shape} values of epsilon with {deltas.shape} of delta; "
                "give one delta an epsilon, and at least one"
            )
        if not (np.all(np.diff(epsilons) > 0) and epsilons[0] >= 0 and epsilons[-1] < math.inf):
            raise ValueError("epsilons must be finite, ascending, and 0 or more")
        if not np.all((deltas >= 0) & (deltas <= 1)):
            raise ValueError("a delta is not a probability; give numbers from 0 to 1")
        # (ε, δ) holds for all larger ε too.
        deltas = np.minimum.accumulate(deltas)
        object.__setattr__(self, "epsilons", epsilons)
        object.__setattr__(self, "deltas", deltas)
        low = epsilons <= _STEEPEST
        slopes, tops = _lines(epsilons[low], deltas[low])
        object.__setattr__(self, "_slopes", slopes)
        object.__setattr__(self, "_tops", tops)
        object.__setattr__(self, "_corners", np.diff(tops) / np.diff(slopes))

    def __call__(self, type_one: float | Sequence[float] | np.ndarray) -> np.ndarray:
        alphas = np.atleast_1d(np.asarray(type_one, dtype=np.float64))
        if not np.all((alphas >= 0) & (alphas <= 1)):
            raise ValueError(f"type I error {type_one} is not a probability")
        # Any line is below the curve: a corner misplaced by rounding costs nothing but height.
        k = len(self._slopes) - 1 - np.searchsorted(self._corners[::-1], alphas)
        best = self._tops[k] - self._slopes[k] * alphas
        best = np.where(alphas == 0, 1 - self.deltas[-1], best)
        return np.clip(best, 0.0, 1.0 - alphas)

    def delta(self, epsilon: float | np.ndarray) -> np.ndarray:
        """δ(ε) = sup_α 1 − f(α) − e^ε·α, the dual; between two points linear in e^ε."""
        at = np.atleast_1d(np.asarray(epsilon, dtype=np.float64))
        if not np.all(at >= 0):
            raise ValueError(f"epsilon is {epsilon}; give 0 or more (the curve is symmetric)")
        points, values = self._dual_points()
        k = np.clip(np.searchsorted(points, at, side="right") - 1, 0, len(points) - 2)
        before, after = points[k], points[k + 1]
        inside = np.minimum(at, after)
        # (e^ε − e^a) / (e^b − e^a), without e to the power of anything above 0.
        share = np.exp(inside - after) * np.expm1(before - inside) / np.expm1(before - after)
        return values[k] + share * (values[k + 1] - values[k])

    def epsilon(self, delta: float) -> float:
        """The least ε with δ(ε) ≤ δ; infinite where no point of the curve is that low."""
        if not 0 < delta < 1:
            raise ValueError(f"delta is {delta!r}; give a number strictly between 0 and 1")
        if self.delta(0.0)[0] <= delta:
            return 0.0
        points, values = self._dual_points()
        if values[-1] > delta:
            return math.inf
        k = int(np.argmax(values <= delta))
        share = (values[k - 1] - delta) / (values[k - 1] - values[k])
        return max(
            0.0, float(points[k] + np.log1p((1 - share) * np.expm1(points[k - 1] - points[k])))
        )

    def _dual_points(self) -> tuple[np.ndarray, np.ndarray]:
        """The points, after the mirror image of the first: slope −e^(−ε), top e^(−ε)·(1 − δ)."""
        first, delta = self.epsilons[0], self.deltas[0]
        mirrored = -math.expm1(-first) + math.exp(-first) * delta
        points = np.concatenate([[-first if first > 0 else -1.0], self.epsilons])
        return points, np.concatenate([[mirrored if first > 0 else delta], self.deltas])

    @property
    def advantage(self) -> float:
        """max_α 1 − α − f(α) = δ(0): 0 where the best test is a guess, 1 where it is certain."""
        return float(self.delta(0.0)[0])

    def gaussian_mu(self, smallest_error: float = 1e-6, points: int = 100_000) -> float:
        """The least μ with G_μ(α) ≤ f(α) wherever α and f(α) are at least `smallest_error`.

        μ = sup Φ⁻¹(1 − α) − Φ⁻¹(f(α)), rounded up by the step of Φ⁻¹ between two points. A mass
        that gives all away, however small, is below no Gaussian curve; hence the smallest error.
        """
        if not 0 < smallest_error < 0.5:
            raise ValueError(f"smallest error is {smallest_error}; give a number from 0 to 0.5")
        alphas = ndtr(-np.linspace(-ndtri(smallest_error), ndtri(smallest_error), points))
        errors = self(alphas)
        if errors[0] < smallest_error:
            return math.inf
        # Both fall: on a cell G_μ is at most its left value, and f at least its right one.
        inside = errors[:-1] >= smallest_error
        least = np.maximum(errors[1:], smallest_error)[inside]
        gaps = -ndtri(alphas[:-1][inside]) - ndtri(least)
        return max(0.0, float(gaps.max(initial=0.0)))


def _lines(epsilons: np.ndarray, deltas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """−slope and top of every line of the envelope, the flat one first."""
    kept: list[int] = []
    steep = np.exp(epsilons)
    for k in range(len(epsilons)):
        # Monotone chain: a point above the chord of its neighbours is never the best line.
        while len(kept) > 1 and (deltas[kept[-1]] - deltas[kept[-2]]) * (
            steep[k] - steep[kept[-2]]
        ) >= (deltas[k] - deltas[kept[-2]]) * (steep[kept[-1]] - steep[kept[-2]]):
            kept.pop()
        kept.append(k)
    epsilons, deltas = epsilons[kept], deltas[kept]
    mirrored = epsilons > 0
    slopes = [[0.0], np.exp(-epsilons[mirrored][::-1]), np.exp(epsilons)]
    tops = [[0.0], (np.exp(-epsilons) * (1 - deltas))[mirrored][::-1], 1 - deltas]
    return np.concatenate(slopes), np.concatenate(tops)


def trade_off(
    noise_multiplier: float,
    sampling: Scheme | Sampler,
    steps: int,
    *,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    unit: Unit = Unit.RECORD,
    prelude: Sequence[dpa.DpEvent] = (),
) -> TradeOff:
    """The trade-off curve of a whole run, both directions of the relation taken together."""
    seen = accounted_relation(relation, unit)
    scheme_of(sampling).require(seen)
    event = run_event(sampling, noise_multiplier, steps, unit=unit, prelude=prelude)
    return curve_of_event(event, seen, relation=relation)


def curve_of_event(
    event: dpa.DpEvent, accounted: Relation | None, relation: Relation | None
) -> TradeOff:
    """The curve of an event under the relation it is accounted under."""
    factors: tuple[tuple[Release | TradeOff, int], ...] = ((Release(event, accounted), 1),)
    unsampled = gaussian_multiplier(event)
    if unsampled is not None:
        epsilons, deltas = _gaussian_points(1 / unsampled)
        return TradeOff(epsilons, deltas, relation, factors)
    loss = privacy_loss(event, accounted or Relation.ADD_OR_REMOVE_ONE)
    return curve_of_loss(loss, num_convolutions(event), relation, factors)


def curve_of_loss(
    loss: PrivacyLoss | None,
    convolutions: int,
    relation: Relation | None,
    factors: tuple[tuple[Release | TradeOff, int], ...],
) -> TradeOff:
    """The curve of a pessimistic PLD (None: nothing is private); its rounding is added to δ."""
    if loss is None:
        return TradeOff(np.zeros(1), np.ones(1), relation, factors)
    epsilons, deltas = profile_of(loss)
    paid = np.minimum(deltas + convolutions * ROUNDING_A_STEP, 1.0)
    return TradeOff(epsilons, paid, relation, factors)


def gaussian_trade_off(mu: float) -> TradeOff:
    """G_μ(α) = Φ(Φ⁻¹(1 − α) − μ), as its tangents: never above it.  [Dong 2022, Def. 2.6]"""
    if not mu >= 0:
        raise ValueError(f"mu is {mu}; give 0 or more")
    multiplier = 1 / mu if mu > 0 else math.inf
    return curve_of_event(dpa.GaussianDpEvent(multiplier), None, None)


def _gaussian_points(mu: float) -> tuple[np.ndarray, np.ndarray]:
    """ε = x·μ − μ²/2 at even x = Φ⁻¹(1 − α), from slope −1 to where δ is 1e-15 or less."""
    count = min(2_000 + math.ceil(250 * mu), 20_000)
    epsilons = np.linspace(0.0, mu * mu / 2 + 8 * mu, count)
    deltas = gaussian_profile(epsilons, 1 / mu)
    return epsilons, np.minimum(deltas * (1 + 1e-12) + 1e-15, 1.0)
