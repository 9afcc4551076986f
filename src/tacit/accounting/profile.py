"""The privacy profile of a composed loss, at the slopes where a curve needs its tangents."""

from __future__ import annotations

import numpy as np
from dp_accounting.pld import pld_pmf

from tacit.accounting.pld import PrivacyLoss

_NEGLIGIBLE = 1e-13  # losses above the point with this tail are left to the last tangent
# All terms below are positive, so that rounding is relative; this is many times its worst.
_RELATIVE_ROUNDING = 1e-9


def profile_of(loss: PrivacyLoss, count: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """(ε, δ(ε)) for up to 2·count values of ε ≥ 0, the larger δ of the two directions at each.

    δ(ε) = Σ_{l > ε} P(l)·(1 − e^(ε−l)) + P(∞), rounded up. Between two values the curve is held
    by their tangents alone, which is a lower bound; half of the values are evenly spaced and half
    geometrically, on the grid of the losses, where the curve has its corners.
    """
    # Two directions as dp-accounting keeps them; it has no public way to read their masses.
    directions = [_masses(pmf) for pmf in {id(p): p for p in _pmfs(loss)}.values()]
    step = directions[0][0]
    last = max(1, *(_last_index(lowest, probs) for _, lowest, probs, _ in directions))
    indices = np.unique(
        np.concatenate(
            [
                np.linspace(0, last, min(count, last + 1)).round(),
                np.geomspace(1, last, count).round(),
            ]
        )
    )
    deltas = np.maximum.reduce([_deltas(indices, *direction) for direction in directions])
    return indices * step, np.minimum(deltas * (1 + _RELATIVE_ROUNDING), 1.0)


def _pmfs(loss: PrivacyLoss) -> tuple[pld_pmf.PLDPmf, pld_pmf.PLDPmf]:
    return loss._pmf_remove, loss._pmf_add


def _masses(pmf: pld_pmf.PLDPmf) -> tuple[float, int, np.ndarray, float]:
    """Grid step, index of the first loss, masses, and the mass at infinity."""
    dense = pmf.to_dense_pmf()
    probs = np.asarray(dense._probs, dtype=np.float64)
    return dense._discretization, int(dense._lower_loss), probs, float(dense._infinity_mass)


def _last_index(lowest: int, probs: np.ndarray) -> int:
    tail = np.cumsum(probs[::-1])[::-1]
    return lowest + int(np.count_nonzero(tail > _NEGLIGIBLE))


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
