"""Small mechanisms whose best of K can be computed exactly."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import logsumexp

from tacit.sampling import NumRuns


def generating_function(runs: NumRuns, x: np.ndarray) -> np.ndarray:
    """f(x) = Σ P(K = k)·x^k, from closed forms that the sources do not use."""
    if runs.shape is None:
        return np.exp(runs.mean * (x - 1))
    gamma, eta = runs.gamma, runs.shape
    if eta == 0:
        return np.log1p(-(1 - gamma) * x) / math.log(gamma)
    return ((1 - (1 - gamma) * x) ** -eta - 1) / (gamma**-eta - 1)


def best_of(runs: NumRuns, law: np.ndarray) -> np.ndarray:
    """The law of the best of K: outcome i is better than i − 1, and the last entry is K = 0."""
    not_better = np.concatenate([[0.0], np.cumsum(law)])
    not_better[-1] = 1.0
    values = generating_function(runs, not_better)
    return np.concatenate([np.diff(values), values[:1]])


def delta_at(one: np.ndarray, other: np.ndarray, epsilon: float) -> float:
    """δ(ε) of two laws on the same outcomes, in the worse direction."""
    return max(
        float(np.maximum(p - math.exp(epsilon) * q, 0).sum())
        for p, q in ((one, other), (other, one))
    )


def renyi(one: np.ndarray, other: np.ndarray, order: float) -> float:
    """The Rényi divergence at this order, in the worse direction."""
    both = (one > 0) & (other > 0)
    p, q = one[both], other[both]
    return max(
        float(logsumexp(order * np.log(a) + (1 - order) * np.log(b))) / (order - 1)
        for a, b in ((p, q), (q, p))
    )


def randomised_response(epsilon: float, order: str) -> tuple[np.ndarray, np.ndarray]:
    """Two outcomes, each dataset's own being likelier by e^ε; `order` says which is the better."""
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    one = np.array([1 - right, right])
    return (one, one[::-1]) if order == "own" else (one[::-1], one)
