"""Composition of losses by the fast Fourier transform, with an error that is paid for.

**ε at one δ: `epsilon_one_way`.** The masses p of one step are tilted first:
p̃_l = p_l·e^(θl) / M(θ), M(θ) = Σ p_l·e^(θl). With K = T·log M(θ), the sum S of T losses has the
mass e^(K − θs) times that of p̃ convolved T times. The θ that minimises (K(θ) + log 1/δ) / θ moves
its bulk to about ε, so that rounding, which is relative to the bulk, stays relative to δ,
however small that is [Wilson 2016]. All that is left out is charged:

- *Losses beyond the grid of a step* are counted as ∞: T times their mass is paid out of δ.
- *The transform is circular*, on a window [a, b). Mass below a comes back at higher losses, which
  only raises δ. Mass at b or above would come back too low; it is at most e^(K(θ') − θ'·b) for
  every θ' > 0 (Chernoff), which is paid out of δ. b is so high that what comes back, with the
  weight of where it comes back, does not matter.
- *Rounding of the transform.* One atom, the likeliest, is taken out of p̃ and added to its
  coefficients f_k exactly. They are right to 4·log₂(length) units in the last place of the 2-norm
  of the rest, and so f_k^T is to T times that, relatively. By Parseval's theorem the 2-norm of
  the masses has the same relative error, and by Cauchy and Schwarz's inequality δ has at most
  that times the 2-norm of the weights; it is added. Sums of positive terms are right to 1e-6 of
  δ, which is paid as well.

**The whole curve** (`composed`) is for trade-off functions. It needs all ε at
once, so nothing is tilted, and rounding costs `ROUNDING_A_STEP` of δ per step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter
from scipy.special import logsumexp

from tacit.accounting.dominating_pairs import Losses, Pair

# An untilted convolution rounds by about 5e-17 of mass a step; four times that is paid out of δ.
ROUNDING_A_STEP = 2e-16
CURVE_TAIL = 1e-20  # the mass that a whole curve counts as an infinite loss, per step
_LEFT_OUT = 1e-6  # the share of δ that goes to each thing that is cut off
_SUMMING = 1e-6
_MAGNIFIED = 1e-3
_NEAR = 4.0  # a tilt may be that far, in log probability, from the best
_ROUNDS = 5  # and how often it is chosen again
_INVISIBLE = 80.0  # coefficients below e^-80 are 0
_LOUD = 30.0  # masses are read where e^(K − θs) is at most e^30·δ


@dataclass(frozen=True)
class Grid:
    """How fine the grid is: the most points, and how many over one step's standard deviation.

    Any grid gives a valid upper bound of δ. Rounding adds a share of 1 / (6·points_per_deviation²)
    to the variance of the losses, unless `points` is the limit.
    """

    points: int
    points_per_deviation: int


FINE = Grid(points=1 << 21, points_per_deviation=400)
COARSE = Grid(points=1 << 17, points_per_deviation=40)


PrivacyLoss = tuple[Losses, ...]  # of (P, Q), and of (Q, P) unless it is the same
Steps = list[tuple[Pair, int]]
_Sketch = tuple[np.ndarray, np.ndarray, int]  # losses, their masses, how many such steps


@dataclass(frozen=True, eq=False)
class Moments:
    """K(θ) = log E[e^(θS)] of one direction of a composition, from sketches of its steps."""

    thetas: np.ndarray  # ascending, through 0
    values: np.ndarray

    @staticmethod
    def of(sketches: Sequence[_Sketch]) -> Moments:
        deviation = math.sqrt(max(variance_of(sketches), 1e-300))
        positive = np.geomspace(1e-6, 1e3, 120) / deviation
        thetas = np.concatenate([-positive[::-1], [0.0], positive])
        values = np.zeros(len(thetas))
        for losses, masses, count in sketches:
            kept = masses > 0
            with np.errstate(over="ignore"):
                exponents = np.outer(thetas, losses[kept]) + np.log(masses[kept] / masses.sum())
            values += count * logsumexp(exponents, axis=1)
        return Moments(thetas, values)

    def tilts(self, log_tail: float, at: float) -> np.ndarray:
        """The positive θ for which Chernoff's bound e^(K(θ) − θs) of P(S ≥ s) is least, and lower
        ones for which it is within a factor e^4, or e where `at` is finite.

        s is the least loss for which the bound is e^log_tail, or `at` if that is less.
        """
        above = np.flatnonzero(self.thetas > 0)[:-1]
        thetas, values = self.thetas[above], self.values[above]
        s = min(at, float(np.min((values - log_tail) / thetas)))
        bounds = values - thetas * s
        best = int(np.argmin(bounds))
        near = bounds <= bounds[best] + (_NEAR if at == math.inf else 1.0)
        return thetas[near & (thetas <= thetas[best])]

    def at(self, theta: float) -> float:
        return float(self.values[self.thetas == theta][0])

    def ends(self, theta: float, log_low: float, log_high: float) -> tuple[float, float, float]:
        """[a, b) that the distribution tilted by θ leaves with masses e^log_low and e^log_high at
        most, and the θ' of the bound at b."""
        at = self.at(theta)
        below, above = self.thetas < theta, self.thetas > theta
        low = (at - self.values[below] + log_low) / (theta - self.thetas[below])
        high = (self.values[above] - at - log_high) / (self.thetas[above] - theta)
        k = int(np.argmin(high))
        return float(np.max(low)), float(high[k]), float(self.thetas[above][k])


def variance_of(sketches: Sequence[_Sketch]) -> float:
    """Σ count·E[L²]; each L has a mean of about half its second moment where it is small."""
    return math.fsum(count * float(np.dot(masses, losses**2)) for losses, masses, count in sketches)


def sketches_of(steps: Steps, tail: float, reverse: bool) -> list[_Sketch]:
    return [(*pair.sketch(tail, reverse), count) for pair, count in steps]


def _rounded(sketch: _Sketch, step: float) -> _Sketch:
    """About what the grid makes of it: each mass shared by the two nearest points."""
    losses, masses, count = sketch
    low = np.floor(losses / step)
    share = losses / step - low
    ends = np.concatenate([low, low + 1]) * step
    return ends, np.concatenate([masses * (1 - share), masses * share]), count


def grid_step(sketches: Sequence[_Sketch], window: float, grid: Grid) -> float:
    """A grid step of few digits, so that its multiples are exact.

    Rounding to a grid h adds at most E[min(h·|L|, h²/4)] to the variance of one loss, about
    E[min(h·|L|, h²/6)] where losses are smooth. h keeps that to 1 / (6·points_per_deviation²) of
    the variance of all losses together, unless the window or one step then had more than
    `points` points.
    """
    allowed = variance_of(sketches) / (6 * grid.points_per_deviation**2)
    span = max(window, *(float(np.ptp(losses)) for losses, _, _ in sketches))

    def added(step: float) -> float:
        return math.fsum(
            count * float(np.dot(masses, np.minimum(step * np.abs(losses), step**2 / 6)))
            for losses, masses, count in sketches
        )

    step = span / grid.points
    while allowed > 0 and added(step * 1.1) <= allowed:
        step *= 1.1
    mantissa, exponent = math.frexp(step)
    return math.ldexp(math.ceil(mantissa * 32) / 32, exponent)


def epsilon_one_way(steps: Steps, reverse: bool, delta: float, grid: Grid) -> float:
    """ε of (P, Q), or of (Q, P)."""
    tail = _LEFT_OUT * delta / sum(count for _, count in steps)
    sketches = sketches_of(steps, tail, reverse)
    window = _Window.at(Moments.of(sketches), delta)
    step = grid_step(sketches, window.top - window.bottom, grid)
    losses = [(pair.losses(step, tail, reverse), count) for pair, count in steps]
    if len(losses) == 1 and losses[0][1] == 1:
        return _epsilon_of_one(losses[0][0], delta)
    moments = Moments.of([_rounded(sketch, step) for sketch in sketches])
    found = math.inf
    for _ in range(_ROUNDS):
        window = _Window.at(moments, delta, found)
        if found < math.inf and window.top - window.bottom > grid.points * step:
            break
        before, (found, magnified) = found, _epsilon(losses, window, delta, found)
        # Where rounding was magnified, θ was chosen for too high an ε.
        if not magnified or found > 0.999 * before:
            break
    return found


@dataclass(frozen=True)
class _Window:
    """Where the composed losses are computed, tilted by θ; `beyond` is the θ' of the bound at b."""

    theta: float
    bottom: float
    top: float
    beyond: float

    @staticmethod
    def at(moments: Moments, delta: float, epsilon: float = math.inf) -> _Window:
        """For ε at δ, or a better one where ε is known not to be above `epsilon`."""
        left_out = math.log(_LEFT_OUT)
        found = []
        for theta in moments.tilts(math.log(delta), epsilon):
            loud = min(_LOUD, moments.at(theta) - math.log(delta))
            bottom, top, beyond = moments.ends(theta, left_out - 12, left_out - loud)
            found.append(_Window(theta, min(bottom, 0.0), max(top, 0.0), beyond))
        return min(found, key=lambda window: window.top - window.bottom)


def _log_moment(losses: Losses, theta: float) -> float:
    return _tilted(losses, theta)[1]


def _tilted(losses: Losses, theta: float) -> tuple[np.ndarray, float]:
    """p̃, and log M(θ)."""
    exponents = theta * losses.values
    highest = float(exponents[-1] if theta > 0 else exponents[0])
    if abs(highest) < 300:
        tilted = losses.masses * np.exp(exponents)
        total = float(tilted.sum())
        return tilted / total, math.log(total)
    with np.errstate(divide="ignore"):
        exponents += np.log(losses.masses)
    log_total = float(logsumexp(exponents))
    return np.exp(exponents - log_total), log_total


def _epsilon(
    steps: Sequence[tuple[Losses, int]], window: _Window, delta: float, most: float
) -> tuple[float, bool]:
    """ε of one direction, and whether the tilt magnified rounding so that it may be too high."""
    step, theta = steps[0][0].step, window.theta
    bottom = math.floor(window.bottom / step)
    size = next_fast_len(math.ceil(window.top / step) - bottom + 1, real=True)
    beyond = math.fsum(count * _log_moment(losses, window.beyond) for losses, count in steps)
    top = step * (bottom + size)
    paid = delta * (1 - _SUMMING) - math.exp(min(beyond - window.beyond * top, 0.0))
    paid -= math.fsum(count * losses.infinity for losses, count in steps)
    if paid <= 0:
        return most, False
    log_scale, tilted = 0.0, []
    for losses, count in steps:
        masses, log_moment = _tilted(losses, theta)
        tilted.append((masses, losses.first, count))
        log_scale += count * log_moment
    masses, error = _power_of(tilted, bottom, size)
    values = step * np.arange(bottom, bottom + size)
    logs = log_scale - theta * values
    start = int(np.searchsorted(-logs, -(math.log(delta) + _LOUD)))
    start = min(max(start, -bottom), size - 1)  # from ε = 0 on
    values, scale = values[start:], np.exp(logs[start:])
    masses = np.maximum(masses[start:], 0.0) * scale
    # δ(ε) = A_k − e^(ε − l_k)·B_k for l_(k−1) ≤ ε ≤ l_k, where A_k = Σ P(l) and
    # B_k = Σ P(l)·e^(l_k − l) over l ≥ l_k. Its error is at most ‖error‖·‖scale‖
    # [Cauchy and Schwarz].
    sums, squares = (np.cumsum(terms[::-1])[::-1] for terms in (masses, scale**2))
    discounted = lfilter([1.0], [1.0, -math.exp(-step)], masses[::-1])[::-1]
    charged = error * np.sqrt(squares)
    inside = sums - discounted + charged <= paid
    if not inside.any():
        return min(most, top), True  # P(S ≥ top) is paid for
    k = int(np.argmax(inside))
    if k == 0:
        return min(most, max(0.0, float(values[0]))), start > -bottom
    found = max(0.0, _between(values, sums + charged[k - 1], discounted, paid, k))
    return min(most, found), bool(charged[k] > _MAGNIFIED * delta)


def _epsilon_of_one(losses: Losses, delta: float) -> float:
    """ε of a single step: nothing is transformed."""
    start = min(max(-losses.first, 0), len(losses.masses) - 1)
    values, masses = losses.values[start:], losses.masses[start:]
    paid = delta * (1 - _SUMMING) - losses.infinity
    sums = np.cumsum(masses[::-1])[::-1]
    discounted = lfilter([1.0], [1.0, -math.exp(-losses.step)], masses[::-1])[::-1]
    inside = sums - discounted <= paid
    if not inside.any():
        return math.inf
    return max(0.0, _between(values, sums, discounted, paid, int(np.argmax(inside))))


def _between(
    values: np.ndarray, sums: np.ndarray, discounted: np.ndarray, paid: float, k: int
) -> float:
    """ε with A_k − e^(ε − l_k)·B_k = paid, from l_(k−1) to l_k."""
    found = float(values[k])
    if k > 0 and discounted[k] > 0:
        ratio = float((sums[k] - paid) / discounted[k])
        found += math.log(ratio) if 0 < ratio < 1 else 0.0
        found = max(found, float(values[k - 1]))
    return found


def _folded(masses: np.ndarray, first: int, size: int) -> np.ndarray:
    """Masses at first, first + 1, … modulo `size`."""
    start = first % size
    padded = np.zeros(size * math.ceil((start + len(masses)) / size))
    padded[start : start + len(masses)] = masses
    return padded.reshape(-1, size).sum(axis=0)


def _power_of(
    steps: Sequence[tuple[np.ndarray, int, int]], bottom: int, size: int
) -> tuple[np.ndarray, float]:
    """The masses of all steps together, (masses, first, count) each, at bottom, bottom + 1, …
    modulo `size`; and a bound of their rounding in the 2-norm."""
    spectrum, rounding, shift = np.ones(size // 2 + 1, dtype=np.complex128), 1.0, 0
    for masses, first, count in steps:
        # Most of a step's mass is often one atom. To transform the rest alone rounds less.
        likeliest = int(np.argmax(masses))
        shift += count * (first + likeliest)
        others = _folded(masses, -likeliest, size)
        others[0] -= 1
        rounding += count * float(np.linalg.norm(others))
        less_one = rfft(others)
        kept = np.hypot(1 + less_one.real, less_one.imag) > math.exp(-_INVISIBLE / count)
        spectrum[~kept] = 0
        spectrum[kept] *= np.exp(count * np.log1p(less_one[kept]))
    total = np.roll(irfft(spectrum, size), (shift - bottom) % size)
    # An error of the spectrum in the 2-norm is one of the masses [Parseval].
    error = rounding * 4 * np.finfo(float).eps * math.log2(size) * float(np.linalg.norm(total))
    return total, error


def composed(steps: Sequence[tuple[PrivacyLoss, int]], interval: float) -> PrivacyLoss:
    """The losses of all steps together, all on the grid of `interval`, in each direction.

    Not tilted: masses are right to about `ROUNDING_A_STEP` per step.
    """
    if not steps:
        return (Losses(interval, 0, np.ones(1)),)
    ways = max(len(directions) for directions, _ in steps)
    return tuple(
        _convolved(
            [(directions[min(way, len(directions) - 1)], count) for directions, count in steps]
        )
        for way in range(ways)
    )


def _convolved(steps: Sequence[tuple[Losses, int]]) -> Losses:
    step = steps[0][0].step
    log_tail = math.log(CURVE_TAIL)
    moments = Moments.of([(*_binned(losses), count) for losses, count in steps])
    low, high, beyond = moments.ends(0.0, log_tail, log_tail)
    bottom = max(math.floor(low / step), sum(count * losses.first for losses, count in steps))
    top = sum(count * (losses.first + len(losses.masses) - 1) for losses, count in steps)
    top = max(bottom, min(math.ceil(high / step), top))
    size = next_fast_len(top - bottom + 1, real=True)
    infinity = math.fsum(count * losses.infinity for losses, count in steps)
    log_beyond = math.fsum(count * _tilted(losses, beyond)[1] for losses, count in steps)
    infinity += math.exp(min(log_beyond - beyond * step * (bottom + size), 0.0))
    masses, _ = _power_of(
        [(losses.masses, losses.first, count) for losses, count in steps], bottom, size
    )
    return Losses(step, bottom, np.maximum(masses, 0.0), min(infinity, 1.0))


def _binned(losses: Losses, bins: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """A sketch of losses that are on a grid already."""
    width = math.ceil(len(losses.masses) / bins)
    starts = np.arange(0, len(losses.masses), width)
    masses = np.add.reduceat(losses.masses, starts)
    means = np.add.reduceat(losses.masses * losses.values, starts) / np.maximum(masses, 1e-300)
    return means, masses
