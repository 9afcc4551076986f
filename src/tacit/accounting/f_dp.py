"""Trade-off curves: how well the best test can detect one record (f-DP).

A curve comes from a run's event (`trade_off`), is composed with others (`tensor_product`), is
amplified by sampling (`subsample`), and is drawn as type I against type II error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import dp_accounting as dpa
import numpy as np
from scipy.special import ndtr, ndtri

from tacit import canvas
from tacit.accounting.composition import ROUNDING_A_STEP, PrivacyLoss, composed
from tacit.accounting.events import components_of
from tacit.accounting.plan import Plan, scheme_of
from tacit.accounting.pld import (
    curve_step,
    gaussian_multiplier,
    gaussian_profile,
    not_private,
    num_convolutions,
    privacy_loss,
    profile_of,
    symmetric_loss,
)
from tacit.budget import Relation, require_delta
from tacit.sampling.sampler import Sampler
from tacit.sampling.scheme import Scheme, Unit

if TYPE_CHECKING:
    from tacit.accounting.gaussian_dp import GaussianDpEstimate

_STEEPEST = 690.0  # e^ε beyond is out of a double's range, and α·e^ε > 1 for every α that is not


@dataclass(frozen=True)
class AccountedEvent:
    """An event and the relation it is accounted under (None: the same under both)."""

    event: dpa.DpEvent
    relation: Relation | None


Factor: TypeAlias = "tuple[AccountedEvent | TradeOff, int]"


@dataclass(frozen=True, eq=False)
class TradeOff:
    """f(α): the least type II error of any test whose type I error is at most α.  [Dong 2022]

    A symmetric curve, given by points (ε, δ) of a privacy profile, 0 ≤ ε ascending:
    f(α) = max over the points of max(1 − δ − e^ε·α, e^(−ε)·(1 − δ − α), 0)  [Dong 2022, Prop. 2.5].
    Each point is a line that the true curve is above, so for any points whose δ is not too small
    **f is never above the truth**: no test does better than it says.

    `relation` is the one the curve is for, where it is for one. `factors` says what it was
    composed of and how often, so that a tensor product can compose that and not its outline.
    """

    epsilons: np.ndarray
    deltas: np.ndarray
    relation: Relation | None = None
    factors: tuple[Factor, ...] = ()

    def __repr__(self) -> str:
        return f"TradeOff({len(self.epsilons)} points, relation={self.relation!r})"

    def __post_init__(self) -> None:
        epsilons = np.atleast_1d(np.asarray(self.epsilons, dtype=np.float64))
        deltas = np.atleast_1d(np.asarray(self.deltas, dtype=np.float64))
        if epsilons.shape != deltas.shape or epsilons.ndim != 1 or len(epsilons) == 0:
            raise ValueError(
                f"{epsilons.shape} values of epsilon with {deltas.shape} of delta; "
                "give one delta per epsilon, and at least one"
            )
        if not (np.all(np.diff(epsilons) > 0) and epsilons[0] >= 0 and epsilons[-1] < math.inf):
            raise ValueError("epsilons must be finite, ascending, and 0 or more")
        if not np.all((deltas >= 0) & (deltas <= 1)):
            raise ValueError("a delta is not a probability; give numbers from 0 to 1")
        object.__setattr__(self, "epsilons", epsilons)
        # (ε, δ) holds for all larger ε too.
        object.__setattr__(self, "deltas", np.minimum.accumulate(deltas))

    def __call__(self, type_one: float | Sequence[float] | np.ndarray) -> np.ndarray:
        alphas = np.atleast_1d(np.asarray(type_one, dtype=np.float64))
        if not np.all((alphas >= 0) & (alphas <= 1)):
            raise ValueError(f"type I error {type_one} is not a probability")
        slopes, tops, corners = self._envelope
        # Any line is below the curve: a corner misplaced by rounding costs nothing but height.
        k = len(slopes) - 1 - np.searchsorted(corners[::-1], alphas)
        best = tops[k] - slopes[k] * alphas
        best = np.where(alphas == 0, 1 - self.deltas[-1], best)
        return np.clip(best, 0.0, 1.0 - alphas)

    @cached_property
    def _envelope(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """−slope and top of every line of the curve, the flat one first, and where they meet."""
        finite = self.epsilons <= _STEEPEST
        epsilons, deltas = self.epsilons[finite], self.deltas[finite]
        steep = np.exp(epsilons)
        kept: list[int] = []
        for k in range(len(epsilons)):
            # Monotone chain: a point above the chord of its neighbours is never the best line.
            while len(kept) > 1 and (deltas[kept[-1]] - deltas[kept[-2]]) * (
                steep[k] - steep[kept[-2]]
            ) >= (deltas[k] - deltas[kept[-2]]) * (steep[kept[-1]] - steep[kept[-2]]):
                kept.pop()
            kept.append(k)
        epsilons, deltas = epsilons[kept], deltas[kept]
        mirrored = epsilons > 0
        slopes = np.concatenate([[0.0], np.exp(-epsilons[mirrored][::-1]), np.exp(epsilons)])
        below = (np.exp(-epsilons) * (1 - deltas))[mirrored][::-1]
        tops = np.concatenate([[0.0], below, 1 - deltas])
        return slopes, tops, np.diff(tops) / np.diff(slopes)

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
        require_delta(delta)
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


def trade_off(
    noise_multiplier: float,
    sampling: Scheme | Sampler,
    steps: int,
    *,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    unit: Unit = Unit.RECORD,
    prelude: Sequence[dpa.DpEvent] = (),
) -> TradeOff:
    """The trade-off curve of a whole run, both directions of the relation taken together.

    Example:
        >>> curve = tacit.trade_off(1.0, tacit.sampling.Poisson(0.01), 1000)
        >>> curve(0.01)  # 0.97: the least type II error at a type I error of 1%
    """
    plan = Plan(scheme_of(sampling), noise_multiplier, relation, steps, unit, tuple(prelude))
    return trade_off_of_event(plan.event(steps), plan.accounted_relation, relation)


def trade_off_of_event(
    event: dpa.DpEvent, accounted: Relation, relation: Relation | None = None
) -> TradeOff:
    """The curve of an event whose parameters were all fixed beforehand.

    `accounted` is the relation between sampled units, and `relation` the one that the curve is for.
    """
    return _composed([(AccountedEvent(event, accounted), 1)], relation or accounted)


def gaussian_trade_off(mu: float) -> TradeOff:
    """G_μ(α) = Φ(Φ⁻¹(1 − α) − μ), as its tangents: never above it.  [Dong 2022, Def. 2.6]"""
    if not mu >= 0:
        raise ValueError(f"mu is {mu}; give 0 or more")
    multiplier = 1 / mu if mu > 0 else math.inf
    return _composed([(AccountedEvent(dpa.GaussianDpEvent(multiplier), None), 1)], None)


def _gaussian_points(mu: float) -> tuple[np.ndarray, np.ndarray]:
    """ε = x·μ − μ²/2 at even x = Φ⁻¹(1 − α), from slope −1 to where δ is 1e-15 or less."""
    count = min(2_000 + math.ceil(250 * mu), 20_000)
    epsilons = np.linspace(0.0, mu * mu / 2 + 8 * mu, count)
    deltas = gaussian_profile(epsilons, 1 / mu)
    return epsilons, np.minimum(deltas * (1 + 1e-12) + 1e-15, 1.0)


_MAX_POINTS = 2_000_000
_POINTS_PER_DEVIATION = 500


def tensor_product(*curves: TradeOff) -> TradeOff:
    """f ⊗ g ⊗ …: T(P × P', Q × Q') where f = T(P, Q) and g = T(P', Q').  [Dong 2022, Def. 3.1]

    The guarantee of all releases together, each chosen knowing the ones before it but with its
    curve fixed beforehand [Dong 2022, Thm 3.2]. Privacy losses add up, so their distributions
    are convolved: those of the events behind the curves where there are events (Gaussians in
    closed form), else that of the curve itself, whose lines are the losses of a discrete pair.
    Every step rounds towards a lower curve, so that the product is never above the true one.
    """
    relations = sorted({str(curve.relation) for curve in curves if curve.relation})
    if len(relations) > 1:
        raise ValueError(
            f"curves for {' and '.join(relations)} say nothing together: the neighbours differ; "
            "make all of them for one relation"
        )
    factors = [factor for curve in curves for factor in _factors(curve)]
    return _composed(factors, Relation(relations[0]) if relations else None)


def tensor_power(curve: TradeOff, count: int) -> TradeOff:
    """f^{⊗T}: the same release T times."""
    if count < 0:
        raise ValueError(f"a curve composed {count} times; give 0 or more")
    factors = [(source, count * times) for source, times in _factors(curve)]
    return _composed(factors, curve.relation)


def _factors(curve: TradeOff) -> tuple[Factor, ...]:
    return curve.factors or ((curve, 1),)


def _composed(factors: Sequence[Factor], relation: Relation | None) -> TradeOff:
    """The curve of all factors together; the PLD's rounding is added to δ."""
    factors = tuple(factor for factor in factors if factor[1] > 0)
    events = [
        AccountedEvent(dpa.SelfComposedDpEvent(source.event, count), source.relation)
        for source, count in factors
        if isinstance(source, AccountedEvent)
    ]
    outlines = [(source, count) for source, count in factors if isinstance(source, TradeOff)]
    joint = dpa.ComposedDpEvent([release.event for release in events])
    accounted = {release.relation for release in events} - {None}
    convolutions = num_convolutions(joint)
    loss: PrivacyLoss | None
    if not outlines and len(accounted) < 2:
        under = next(iter(accounted), None)
        factors = ((AccountedEvent(joint, under), 1),)
        unsampled = gaussian_multiplier(joint)
        if unsampled is not None:
            return TradeOff(*_gaussian_points(1 / unsampled), relation, factors)
        loss = privacy_loss(joint, under or Relation.ADD_OR_REMOVE_ONE)
    else:
        loss = _joint_loss(joint, events, outlines)
        convolutions += sum(count + 1 for _, count in outlines) + len(events)
    if loss is None:
        return TradeOff(np.zeros(1), np.ones(1), relation, factors)
    epsilons, deltas = profile_of(loss)
    deltas = np.minimum(deltas + convolutions * ROUNDING_A_STEP, 1.0)
    return TradeOff(epsilons, deltas, relation, factors)


def _joint_loss(
    joint: dpa.DpEvent,
    events: Sequence[AccountedEvent],
    outlines: Sequence[tuple[TradeOff, int]],
) -> PrivacyLoss | None:
    """The loss of `joint`, which is all events, and of the outlines, on one grid; None if nothing
    is private."""
    parts = components_of(joint)
    if not_private(parts):
        return None
    interval = _interval(outlines)
    each: list[tuple[PrivacyLoss, int]] = []
    for release in events:
        under = release.relation or Relation.ADD_OR_REMOVE_ONE
        interval = min(interval, curve_step(components_of(release.event), under))
    for release in events:
        under = release.relation or Relation.ADD_OR_REMOVE_ONE
        loss = privacy_loss(release.event, under, interval=interval)
        assert loss is not None
        each.append((loss, 1))
    for curve, count in outlines:
        # A pair with this symmetric curve, its losses rounded to the grid so that δ only grows.
        each.append(((symmetric_loss(curve.delta, curve.epsilons[-1], interval),), count))
    return composed(each, interval)


def _interval(outlines: Sequence[tuple[TradeOff, int]]) -> float:
    """A power of two: h = √(V/N)/500 for N losses of joint variance V, if that fits in memory.

    Rounding to a grid h adds at most h²/4 to the variance of each loss. Line by line, a finite
    loss of ε has mass e^ε·Δα, which gives E_P[l²].
    """
    variance, reach, copies = 0.0, 0.0, 0
    for curve, count in outlines:
        slopes, _, corners = curve._envelope
        corners = np.concatenate([[1.0], np.clip(corners, 0.0, 1.0), [0.0]])
        masses = np.maximum(-np.diff(corners), 0.0) * slopes
        with np.errstate(divide="ignore"):
            losses = np.where(slopes > 0, np.log(slopes), 0.0)
        variance += count * float(np.sum(masses * losses**2))
        reach = max(reach, float(curve.epsilons[-1]))
        copies += count
    if variance == 0:
        return 1e-4
    deviation = math.sqrt(variance)
    # The mean of a loss is at most half its second moment where it is small, and its root always.
    whole = 2 * (11 * deviation + min(variance, math.sqrt(copies) * deviation) + reach)
    step = max(math.sqrt(variance / copies) / _POINTS_PER_DEVIATION, whole / _MAX_POINTS)
    return 2.0 ** math.floor(math.log2(step))


def subsample(curve: TradeOff, probability: float) -> TradeOff:
    """C_p(f) = min{f_p, f_p⁻¹}**, f_p = p·f + (1 − p)·Id, Id(α) = 1 − α.  [Dong 2022, Sec. 4]

    If M is f-DP on m records under replace-one, M on a sample of m of N records without
    replacement is C_{m/N}(f)-DP, in both directions [Dong 2022, Sec. 4].

    Where f is the largest of lines 1 − δ − e^ε·α, f_p is that of p·(1 − δ − e^ε·α) +
    (1 − p)·(1 − α) = 1 − p·δ − (1 + p·(e^ε − 1))·α: again a line, with ε' = log(1 + p·(e^ε − 1))
    and δ' = p·δ. Those with ε ≥ 0 and their mirror images have min{f_p, f_p⁻¹}** as their
    envelope: the other lines of f_p are flatter than −1, where f_p⁻¹ is lower. So nothing is
    rounded but the lines of f themselves, and a curve that is not above f makes one that is not
    above C_p(f).
    """
    if not 0 < probability <= 1:
        raise ValueError(f"probability is {probability}; give a number above 0 and at most 1")
    before, deltas = curve.epsilons, curve.deltas
    if before[0] > 0:
        # A line of slope −1 through a corner of f adds nothing to f, but its image does to f_p.
        before, deltas = np.append(0.0, before), np.append(curve.advantage, deltas)
    # log(1 + p·(e^ε − 1)) = ε + log(p + (1 − p)·e^(−ε)), whose exponent cannot overflow.
    small = np.log1p(probability * np.expm1(np.minimum(before, 1.0)))
    large = before + np.log(probability + (1 - probability) * np.exp(-before))
    # Two lines may meet in one double: the lower δ, which is the later one's, holds for both.
    epsilons, last = np.unique(np.where(before < 1, small, large)[::-1], return_index=True)
    return TradeOff(epsilons, (probability * deltas)[::-1][last], curve.relation)


_GREY = "0.55"


def plot_trade_offs(
    curves: Mapping[str, TradeOff],
    path: str | os.PathLike[str],
    limits: Mapping[str, GaussianDpEstimate] | None = None,
    title: str = "the best test for one record's presence",
) -> None:
    """Each run's exact curve, by name; its CLT curve dashed; G_μ and the perfect 1 − α in grey.

    A test's errors lie on or above the curve of its run. The nearer a curve is to 1 − α, the less
    a test detects.
    """
    if not curves:
        raise ValueError("no curves to draw; give at least one, by name")
    figure, ((axes,),) = canvas.blank(size=(5.8, 5.8))
    # Dense at both ends, where curves bend.
    alphas = np.concatenate([[0.0], ndtr(np.linspace(-6, 6, 601)), [1.0]])
    axes.plot([0, 1], [1, 0], color=_GREY, linewidth=1)
    axes.text(0.53, 0.53, "perfect: 1 − α", rotation=-45, ha="center", va="center",
              rotation_mode="anchor", color=_GREY)  # fmt: skip
    for mu in (0.5, 1.0, 2.0):
        axes.plot(alphas, ndtr(-ndtri(alphas) - mu), color=_GREY, linewidth=0.8, linestyle=":")
        at = float(ndtr(-mu / 2))
        axes.annotate(
            f"$G_{{{mu:g}}}$", (at, at), (-1, -1), textcoords="offset points",
            ha="right", va="top", color=_GREY,
        )  # fmt: skip
    for number, (name, curve) in enumerate(curves.items()):
        colour = f"C{number}"
        # Wide and pale, so that a limit that agrees with it is seen on top of it.
        label = f"{name} (exact)"
        axes.plot(alphas, curve(alphas), color=colour, linewidth=3.5, alpha=0.55, label=label)
        limit = (limits or {}).get(name)
        if limit is not None and np.isfinite(limit.mu):
            words = "CLT, not a guarantee" if limit.approximate else "exactly Gaussian"
            label = f"$G_{{{limit.mu:.2f}}}$ ({words})"
            axes.plot(alphas, limit(alphas), color=colour, linestyle="--", label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.set_xlabel("type I error α: a record is seen that is not there")
    axes.set_ylabel("type II error f(α): a record is missed that is")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize=9)
    axes.set_title(title, fontsize=11)
    canvas.save(figure, path)
