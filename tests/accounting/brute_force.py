"""Divergences and trade-offs by brute force, from the definitions; nothing is shared with src."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.special import log_ndtr, ndtr

Mixture = Sequence[tuple[float, float]]  # (weight, mean) of Gaussians of one deviation


def log_density(x: np.ndarray, mixture: Mixture, std: float) -> np.ndarray:
    terms = [
        math.log(weight) - (x - mean) ** 2 / (2 * std**2) for weight, mean in mixture if weight > 0
    ]
    return np.logaddexp.reduce(terms, axis=0) - math.log(std * math.sqrt(2 * math.pi))


def grid(mixtures: Sequence[Mixture], std: float, points: int = 40_001) -> np.ndarray:
    means = [mean for mixture in mixtures for _, mean in mixture]
    return np.linspace(min(means) - 14 * std, max(means) + 14 * std, points)


def delta_between(p: Mixture, q: Mixture, std: float, epsilons: Sequence[float]) -> np.ndarray:
    """H_ε(P‖Q) = ∫ max(P − e^ε Q, 0), each ε."""
    x = grid((p, q), std)
    dense_p, dense_q = (np.exp(log_density(x, m, std)) for m in (p, q))
    return np.array(
        [
            np.trapezoid(np.maximum(dense_p - math.exp(e) * dense_q, 0.0), x)
            for e in np.atleast_1d(epsilons)
        ]
    )


def renyi_between(p: Mixture, q: Mixture, std: float, order: float) -> float:
    """log ∫ P^α Q^(1−α) / (α − 1), each piece by scipy's adaptive quadrature."""
    from scipy.integrate import quad

    def log_integrand(x: float) -> float:
        at = np.array([x])
        return float(order * log_density(at, p, std)[0] + (1 - order) * log_density(at, q, std)[0])

    means = [mean for mixture in (p, q) for _, mean in mixture]
    spread = max(means) - min(means)
    edges = np.arange(min(means) - 40 * std, max(means) + 2 * order * spread + 40 * std, 4 * std)
    peak = max(log_integrand(x) for x in edges)
    pieces = [
        quad(lambda x: math.exp(log_integrand(x) - peak), low, high, epsabs=0, epsrel=1e-11)[0]
        for low, high in pairwise(edges)
        if max(log_integrand(low), log_integrand((low + high) / 2), log_integrand(high)) > peak - 60
    ]
    return (math.log(math.fsum(pieces)) + peak) / (order - 1)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """δ of N(μ, 1) against N(0, 1): Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)  [Balle & Wang 2018]."""
    log_second = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(min(log_second, 0.0)))


def gaussian_epsilon(delta: float, mu: float) -> float:
    """The inverse of `gaussian_delta` in ε ≥ 0, in 50 digits: near δ = 0 doubles run out."""
    import mpmath

    with mpmath.workdps(50):
        mu, delta = mpmath.mpf(mu), mpmath.mpf(delta)

        def excess(e):
            return (
                mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu) - delta
            )

        low, high = mpmath.mpf(0), mpmath.mpf(1)
        if excess(low) <= 0:
            return 0.0
        while excess(high) > 0:
            low, high = high, 2 * high
        for _ in range(70):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return float(high)


def deltas_of_losses(losses, epsilons: Sequence[float]) -> np.ndarray:
    """Σ_{l > ε} P(l)·(1 − e^(ε−l)) + P(∞) for losses l = step·first, step·(first + 1), …"""
    values = losses.step * np.arange(losses.first, losses.first + len(losses.masses))
    found = []
    for epsilon in epsilons:
        above = values > epsilon
        gained = losses.masses[above] * -np.expm1(epsilon - values[above])
        found.append(losses.infinity + float(np.sum(gained)))
    return np.array(found)


def delta_by_inversion(p: Mixture, q: Mixture, std: float, steps: int, epsilon: float) -> float:
    """δ of `steps` steps of P against Q by an integral in the complex plane, without any grid.

    E[max(1 − e^(ε−S), 0)] = 1/2πi ∫ M(w)^T e^(−wε) / (w·(w+1)) dw along Re w = θ > 0, where
    M(w) = E_P[e^(wL)]; θ is where the integrand is least on the real axis. Both integrals are by
    the trapezoid rule, which is exponentially exact for analytic functions.
    """
    x = grid((p, q), std, 6001)
    log_p = log_density(x, p, std)
    loss = log_p - log_density(x, q, std)
    weights = np.exp(log_p) * (x[1] - x[0])
    weights /= weights.sum()
    unlikely = weights < 1e-45
    loss, weights = loss[~unlikely], weights[~unlikely]

    def log_moment(w):
        """T·log M(w) − w·ε, with what is near 0 computed as such."""
        return steps * np.log1p(np.expm1(np.multiply.outer(w, loss)) @ weights) - w * epsilon

    deviation = math.sqrt(steps * float(weights @ loss**2))
    thetas = np.geomspace(1e-4, 40, 400) / deviation
    with np.errstate(over="ignore"):
        at = [float(log_moment(theta).real) - math.log(theta * (theta + 1)) for theta in thetas]
    theta = float(thetas[np.nanargmin(at)])
    # The step resolves the widest range of S, and the integral ends where nothing is left.
    span = 12 * deviation + 3 * float(loss.max()) + abs(epsilon)
    step, total, start = min(0.5 / span, theta / 8), 0.0, 0
    while True:
        w = theta + 1j * step * np.arange(start, start + 1000)
        terms = np.exp(log_moment(w)) / (w * (w + 1))
        if start == 0:
            terms[0] /= 2
        total += float(terms.real.sum())
        start += 1000
        if np.abs(terms[-100:]).max() * start < 1e-9 * abs(total) or start > 400_000:
            return total * step / math.pi


def epsilon_by_inversion(p: Mixture, q: Mixture, std: float, steps: int, delta: float) -> float:
    from scipy.optimize import brentq

    def excess(epsilon: float) -> float:
        found = delta_by_inversion(p, q, std, steps, epsilon)
        return math.log(max(found, 1e-300) / delta)

    high = 1e-3
    if excess(1e-9) <= 0:
        return 0.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, high / 2 if high > 1e-3 else 1e-9, high, rtol=1e-6))


# Discrete mechanisms: every outcome listed, sorted by likelihood ratio.


Pair = tuple[np.ndarray, np.ndarray]


def response(epsilon: float, delta: float = 0.0) -> Pair:
    """The pair whose trade-off function is f_{ε,δ}: randomised response that may tell all."""
    truth = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    lie = (1 - delta) / (1 + math.exp(epsilon))
    return np.array([delta, truth, lie, 0.0]), np.array([0.0, lie, truth, delta])


def product(*pairs: Pair) -> Pair:
    """All outcomes of independent mechanisms together."""
    p, q = np.ones(1), np.ones(1)
    for one, other in pairs:
        p, q = np.outer(p, one).ravel(), np.outer(q, other).ravel()
    return p, q


def type_two(pair: Pair, alphas: np.ndarray) -> np.ndarray:
    """T(Q, P)(α) by Neyman and Pearson: reject Q where P/Q is largest, first come first served."""
    p, q = pair
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(-np.where(q > 0, p / q, np.inf))
    first = np.concatenate([[0.0], np.cumsum(q[order])])
    second = np.concatenate([[1.0], 1 - np.cumsum(p[order])])
    # Outcomes that Q never makes are rejected at once: of equal α the last counts.
    kept = np.append(np.diff(first) > 0, True)
    return np.clip(np.interp(alphas, first[kept], second[kept]), 0.0, 1.0)
