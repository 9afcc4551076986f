"""Dominating pairs of one step, as losses on a grid from which δ is never under-estimated.

A pair (P, Q) has the loss L = log dP/dQ, and δ(ε) = E_P[max(1 − e^(ε−L), 0)]. z is the noise's
standard deviation over the sensitivity Δ under the relation; everything is in units of Δ.

`Sampled`:   (1−q)·N(0, z²) + q·N(1, z²) against N(0, z²), and the reverse [Zhu 2022, Thm 11].
             Poisson sampling under add-or-remove; q = 1 is the Gaussian itself.
`Replaced`:  (1−q)·N(0) + q·N(½) against (1−q)·N(0) + q·N(−½), variance z²: Poisson, replace-one.
    Proof. Given the others, the two outputs are (1−q)N(0) + qN(g) and (1−q)N(0) + qN(g'),
    where ‖g‖, ‖g'‖ ≤ Δ/2. Take any test S and write a = N(0)(S). By Neyman and Pearson
    N(g)(S) ≤ Φ(Φ⁻¹(a) + Δ/2s) and N(g')(S) ≥ Φ(Φ⁻¹(a) − Δ/2s), and the half-line attains
    both at once for g = Δ/2, g' = −Δ/2. So that pair dominates, in any dimension.
`Subset`:    C_p(G_{1/z}), p = m/N: without replacement, replace-one [Dong 2022, Thm 4.1]. Its
             losses above 0 are those of `Sampled(p)`, those below are their mirror image,
             P(−l) = e^(−l)·P(l), and the rest has loss 0 [Dong 2022, Def. 4.2].
`Mixture`:   a public coin decides which pair it is.
`truncated`: Poisson sampling with rate q of which at most B records take part, a uniformly random
             subset of a larger draw; at most N records. With probability 1 − τ the Poisson pair at
             z, and with probability τ the Poisson pair at z/2, τ = P(Bin(N, q) ≥ B).
    Proof. Let n be how many of the others (at most N) are drawn; it has one law on both sides, so
    it may be revealed. If n < B, nobody is ever dropped: the Poisson pair at z. If n ≥ B, everybody
    else's part is a uniformly random set U of B of them when the record is not in the batch. When
    it is, with probability r = q·B/(n + 1) < q, it has taken the place of a random u in U. Reveal
    (U, u), again of one law. With add-or-remove the outputs are (1−r)N(s) + rN(s + g − u) and
    N(s), ‖g − u‖ ≤ 2C = 2Δ: `Sampled` at z/2 and r. With replace-one they are (1−r)N(s) + rN(s +
    g − u) and (1−r)N(s) + rN(s + g' − u), both shifts at most 2C = Δ, where `Replaced` has Δ/2:
    `Replaced` at z/2 and r. Both pairs grow with the rate and with the distance of the means, by
    the argument of `Replaced`, so r may be raised to q; then the mixture grows with τ, and τ with
    n's law, so that fewer than N others cost less. (Averaging r instead [arXiv 2508.15089] is
    tighter only where most draws are cut, and needs the number of records exactly.)

**Rounding to the grid only raises δ.** The outcomes whose loss is in a cell [a, a + h] have masses
P_c and Q_c. They are replaced by an atom at a and one at a + h that together have the same masses:
hi = (P_c − e^a·Q_c) / (1 − e^(−h)) at a + h and P_c − hi at a. With u = e^(−L) this keeps P_c and
E[u] and spreads u to the ends of its interval. max(1 − e^ε·u₁ ⋯ u_T, 0) is convex in each u_t, so
by Jensen's inequality δ grows at every ε and after any composition (this is "connect the dots"
[Doroshenko 2022]). It decreases in each u_t, so mass that rounding moves up is safe too. `hi`
is a difference of nearby numbers; a bound of its rounding error is added to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri
from scipy.stats import binom

_ROUNDING = 8 * np.finfo(float).eps
_QUADRATURE = 4000


@dataclass(frozen=True, eq=False)
class Losses:
    """Masses of the losses step·first, step·(first + 1), …, and the mass that has loss ∞."""

    step: float
    first: int
    masses: np.ndarray
    infinity: float = 0.0

    @property
    def values(self) -> np.ndarray:
        return self.step * np.arange(self.first, self.first + len(self.masses), dtype=np.float64)


class Pair(Protocol):
    """A pair of distributions that can be put on a grid."""

    @property
    def symmetric(self) -> bool:
        """Whether (Q, P) has the same losses as (P, Q)."""

    def losses(self, step: float, tail: float, reverse: bool = False) -> Losses:
        """(P, Q) on the grid, or (Q, P); what has a mass of about `tail` may be counted as ∞."""

    def sketch(self, tail: float, reverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Losses and their masses at some thousand points: for choosing a grid, not a bound."""


def cells(x: np.ndarray, mean: float, z: float) -> np.ndarray:
    """Masses of N(mean, z²) between ascending points, with a small relative error in both tails."""
    t = (x - mean) / z
    tails = ndtr(-np.abs(t))
    above, below = t[:-1] >= 0, t[1:] <= 0
    signs_a, signs_b = np.where(above, 1.0, -1.0), np.where(below, 1.0, -1.0)
    return np.maximum((~above & ~below) + signs_a * tails[:-1] + signs_b * tails[1:], 0.0)


def _scaled(log_scale: np.ndarray, masses: np.ndarray) -> np.ndarray:
    """e^log_scale · masses, where the first may overflow and the second underflow."""
    with np.errstate(divide="ignore"):
        return np.exp(np.minimum(log_scale + np.log(masses), 700.0))


def _atoms(cell: np.ndarray, rise: np.ndarray, slack: np.ndarray, step: float) -> np.ndarray:
    """Masses on the grid from P_c and P_c − e^a·Q_c of each cell; `slack` bounds the rounding."""
    high = np.clip((rise + slack) / -math.expm1(-step), 0.0, cell)
    masses = np.zeros(len(cell) + 1)
    masses[:-1] += cell - high
    masses[1:] += high
    return masses


def mirrored(step: float, positive: np.ndarray, infinity: float) -> Losses:
    """The symmetric losses with these masses at step·0, step·1, …; the rest has loss 0."""
    negative = positive[1:] * np.exp(-step * np.arange(1, len(positive)))
    centre = max(0.0, 1.0 - infinity - math.fsum(positive[1:]) - math.fsum(negative))
    masses = np.concatenate([negative[::-1], [centre], positive[1:]])
    return Losses(step, 1 - len(positive), masses, infinity)


def deviations_for(tail: float) -> float:
    """Where N(0, 1) has this mass beyond."""
    return float(-ndtri(max(tail, 1e-290)))


@dataclass(frozen=True)
class Sampled:
    """(1−q)·N(0, z²) + q·N(1, z²) against N(0, z²): add-or-remove."""

    z: float
    rate: float

    @property
    def symmetric(self) -> bool:
        return self.rate == 1

    @cached_property
    def _lowest(self) -> float:
        return math.log1p(-self.rate) if self.rate < 1 else -math.inf

    def _inner(self, losses: np.ndarray) -> np.ndarray:
        """y = log dN(1)/dN(0), where the loss is log(1 − q + q·e^y); −∞ where it never is."""
        q = self.rate
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            small = np.log1p(np.expm1(np.minimum(losses, 50.0)) / q)
            large = losses - math.log(q) + np.log1p(-(1 - q) * np.exp(-losses))
        return np.where(losses <= self._lowest, -np.inf, np.where(losses < 40, small, large))

    def _loss(self, x: np.ndarray | float) -> np.ndarray:
        y = (np.asarray(x) - 0.5) / self.z**2
        return np.logaddexp(self._lowest, math.log(self.rate) + y)

    def _ends(self, tail: float, reverse: bool) -> tuple[float, float]:
        away = self.z * deviations_for(tail)
        if reverse:
            return -away, away
        return -away, max(away, 1 + self.z * deviations_for(min(tail / self.rate, 0.5)))

    def on_cells(
        self, step: float, first: int, last: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(x at the grid's losses, N(0)-masses, P-atoms) for the losses first … last."""
        z, q = self.z, self.rate
        losses = step * np.arange(first, last + 1, dtype=np.float64)
        inner = self._inner(losses)
        x = 0.5 + z * z * inner
        none, one = cells(x, 0.0, z), cells(x, 1.0, z)
        # P_c − e^a·Q_c = q·(N(1) − e^(y_a)·N(0)), and −(e^a − 1 + q) replaces −q·e^(y_a) below.
        scaled = _scaled(inner[:-1], none)
        below = np.isneginf(inner[:-1])
        scaled[below] = none[below] * (1 + np.expm1(losses[:-1][below]) / q)
        near_one = ndtr(-np.abs(x[:-1] - 1) / z)
        near_none = _scaled(inner[:-1], ndtr(-np.abs(x[:-1]) / z))
        slack = _ROUNDING * q * (near_one + near_none + one + np.abs(scaled))
        return x, none, _atoms((1 - q) * none + q * one, q * (one - scaled), slack, step)

    def losses(self, step: float, tail: float, reverse: bool = False) -> Losses:
        low, high = self._ends(tail, reverse)
        first = math.floor(float(self._loss(low)) / step)
        last = max(first + 1, math.ceil(float(self._loss(high)) / step))
        x, _, masses = self.on_cells(step, first, last)
        z, q = self.z, self.rate
        under, over = float(ndtr(x[0] / z)), float(ndtr(-x[-1] / z))
        if reverse:
            # An atom (m, e^(−l)·m) of (P, Q) has the loss −l in (Q, P).
            masses = (masses * np.exp(-step * np.arange(first, last + 1)))[::-1]
            masses[0] += over
            return Losses(step, -last, masses, under)
        masses[0] += (1 - q) * under + q * float(ndtr((x[0] - 1) / z))
        return Losses(step, first, masses, (1 - q) * over + q * float(ndtr((1 - x[-1]) / z)))

    def sketch(self, tail: float, reverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
        x = np.linspace(*self._ends(tail, reverse), _QUADRATURE)
        none, losses = cells(x, 0.0, self.z), self._loss((x[1:] + x[:-1]) / 2)
        if reverse:
            return -losses, none
        return losses, (1 - self.rate) * none + self.rate * cells(x, 1.0, self.z)


@dataclass(frozen=True)
class Subset:
    """C_p(G_{1/z}): without replacement, replace-one."""

    z: float
    rate: float
    symmetric = True

    def losses(self, step: float, tail: float, reverse: bool = False) -> Losses:
        pair = Sampled(self.z, self.rate)
        last = max(1, math.ceil(float(pair._loss(pair._ends(tail, False)[1])) / step))
        x, _, masses = pair.on_cells(step, 0, last)
        z, p = self.z, self.rate
        top = float((1 - p) * ndtr(-x[-1] / z) + p * ndtr((1 - x[-1]) / z))
        return mirrored(step, masses, top)

    def sketch(self, tail: float, reverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
        losses, masses = Sampled(self.z, self.rate).sketch(tail)
        losses, masses = losses[losses > 0], masses[losses > 0]
        mirrored = masses * np.exp(-losses)
        rest = max(0.0, 1 - masses.sum() - mirrored.sum())
        return np.concatenate([losses, -losses, [0.0]]), np.concatenate([masses, mirrored, [rest]])


@dataclass(frozen=True)
class Replaced:
    """(1−q)·N(0, z²) + q·N(½, z²) against (1−q)·N(0, z²) + q·N(−½, z²): replace-one."""

    z: float
    rate: float
    symmetric = True

    def _place(self, losses: np.ndarray) -> np.ndarray:
        """x with this loss: x/2z² = l/2 + arcsinh((1−q)/q · e^(1/8z²) · sinh(l/2))."""
        if self.rate == 1:
            return losses * self.z**2
        with np.errstate(divide="ignore"):
            half = losses / 2 + np.log(-np.expm1(-losses) / 2)  # log sinh(l/2)
        scale = half + math.log1p(-self.rate) - math.log(self.rate) + 1 / (8 * self.z**2)
        # arcsinh(e^s), without overflow.
        large = np.maximum(scale, 0.0)
        far = large + np.log1p(np.sqrt(1 + np.exp(-2 * large)))
        near = np.arcsinh(np.exp(np.minimum(scale, 0.0)))
        return 2 * self.z**2 * (losses / 2 + np.where(scale > 0, far, near))

    def _loss(self, x: np.ndarray | float) -> np.ndarray:
        near, far = (
            np.logaddexp(
                math.log1p(-self.rate) if self.rate < 1 else -math.inf,
                math.log(self.rate) + sign * np.asarray(x) / (2 * self.z**2) - 1 / (8 * self.z**2),
            )
            for sign in (1, -1)
        )
        return near - far

    def _end(self, tail: float) -> float:
        away = 0.5 + self.z * deviations_for(min(tail / self.rate, 0.5))
        return max(away, self.z * deviations_for(tail))

    def losses(self, step: float, tail: float, reverse: bool = False) -> Losses:
        z, q = self.z, self.rate
        last = max(1, math.ceil(float(self._loss(np.array(self._end(tail)))) / step))
        losses = step * np.arange(last + 1, dtype=np.float64)
        x = self._place(losses)
        none, plus, minus = (cells(x, mean, z) for mean in (0.0, 0.5, -0.5))
        up, down = (s * x[:-1] / (2 * z * z) - 1 / (8 * z * z) for s in (1, -1))
        # P_c − e^a·Q_c with e^a = (1 − q + q·e^up) / (1 − q + q·e^down), without what cancels.
        parts = plus, _scaled(up, none), _scaled(down, none), minus
        crossed = _scaled(down, plus), _scaled(up, minus)
        rise = q * (1 - q) * (parts[0] - parts[1] + parts[2] - parts[3])
        rise += q * q * (crossed[0] - crossed[1])
        tails = [ndtr(-np.abs(x[:-1] - mean) / z) for mean in (0.0, 0.5, -0.5)]
        slack = (
            tails[1] * (1 + q * np.exp(down))
            + _scaled(up, tails[0])
            + np.exp(down) * tails[0]
            + tails[2]
            + q * _scaled(up, tails[2])
        )
        below = 1 - q + q * np.exp(down)
        cell = (1 - q) * none + q * plus
        masses = _atoms(cell, rise / below, _ROUNDING * q * (slack + sum(parts)) / below, step)
        top = float((1 - q) * ndtr(-x[-1] / z) + q * ndtr((0.5 - x[-1]) / z))
        return mirrored(step, masses, top)

    def sketch(self, tail: float, reverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
        x = np.linspace(-self._end(tail), self._end(tail), _QUADRATURE)
        masses = (1 - self.rate) * cells(x, 0.0, self.z) + self.rate * cells(x, 0.5, self.z)
        return self._loss((x[1:] + x[:-1]) / 2), masses


@dataclass(frozen=True)
class Mixture:
    """Pairs with public probabilities; the rest of the time nothing is released."""

    pairs: tuple[tuple[float, Pair], ...]

    @property
    def symmetric(self) -> bool:
        return all(pair.symmetric for _, pair in self.pairs)

    def losses(self, step: float, tail: float, reverse: bool = False) -> Losses:
        nothing = Losses(step, 0, np.ones(1))
        found = [(w, p.losses(step, min(tail / w, 0.25), reverse)) for w, p in self.pairs]
        return mixed([*found, (self._rest, nothing)])

    def sketch(self, tail: float, reverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
        found = [(w, *pair.sketch(min(tail / w, 0.25), reverse)) for w, pair in self.pairs]
        losses = np.concatenate([values for _, values, _ in found] + [np.zeros(1)])
        masses = np.concatenate([w * m for w, _, m in found] + [np.full(1, self._rest)])
        return losses, masses

    @property
    def _rest(self) -> float:
        return max(0.0, 1 - math.fsum(weight for weight, _ in self.pairs))


def truncated_share(population: int, rate: float, cap: int) -> float:
    """τ = P(Bin(N, q) ≥ B), rounded up."""
    return min(1.0, float(binom.sf(cap - 1, population, rate)) * (1 + 1e-9))


def truncated(
    pair: type[Sampled] | type[Replaced], z: float, rate: float, population: int, cap: int
) -> Pair:
    """Poisson sampling of at most `cap` of at most `population` records."""
    tau = truncated_share(population, rate, cap)
    if tau == 0:
        return pair(z, rate)
    if tau == 1:
        return pair(z / 2, rate)
    return Mixture(((1 - tau, pair(z, rate)), (tau, pair(z / 2, rate))))


def mixed(weighted: Sequence[tuple[float, Losses]]) -> Losses:
    """Σ weight·losses, all on one grid."""
    first = min(losses.first for _, losses in weighted)
    last = max(losses.first + len(losses.masses) for _, losses in weighted)
    masses = np.zeros(last - first)
    for weight, losses in weighted:
        start = losses.first - first
        masses[start : start + len(losses.masses)] += weight * losses.masses
    infinity = math.fsum(weight * losses.infinity for weight, losses in weighted)
    return Losses(weighted[0][1].step, first, masses, infinity)


def gaussian_profile(epsilon: np.ndarray, z: float) -> np.ndarray:
    """δ(ε) = Φ(1/2z − εz) − e^ε Φ(−1/2z − εz) of N(1, z²) against N(0, z²)  [Balle 2018]."""
    upper = ndtr(0.5 / z - epsilon * z)
    lower = np.exp(np.minimum(epsilon + log_ndtr(-0.5 / z - epsilon * z), 0.0))
    return np.clip(upper - lower, 0.0, 1.0)
