"""Trade-off functions by brute force: every outcome listed, sorted by likelihood ratio."""

from __future__ import annotations

import math

import numpy as np

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
