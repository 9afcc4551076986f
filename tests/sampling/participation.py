"""Who took part in which step, and what the theory says of the averages."""

from __future__ import annotations

import math

import numpy as np

# A fair sampler fails a check at this many deviations about once in 10^8.
SIGMAS = 5.7


def participation(sampler, steps: int) -> np.ndarray:
    """took_part[t, i]: whether record id i was in the batch of step t. Nobody may come twice."""
    took_part_TN = np.zeros((steps, len(sampler.records)), dtype=bool)
    for step in range(steps):
        ids = sampler.next_batch().record_ids.numpy()
        took_part_TN[step, ids] = True
        assert len(np.unique(ids)) == len(ids), "somebody is in a batch twice"
    return took_part_TN


def deviations(observed: float, expected: float, std: float) -> float:
    """How many standard deviations `observed` is off; infinitely many where none are allowed."""
    if std == 0:
        return 0.0 if math.isclose(observed, expected, abs_tol=1e-12) else math.inf
    return abs(observed - expected) / std


def rate_is_off(took_part_TN: np.ndarray, rate: float) -> bool:
    """Whether the mean participation of all, or of any one record, is not `rate`.

    For independent draws the deviations are exact; for negatively dependent ones an upper bound.
    """
    steps, num = took_part_TN.shape
    one = math.sqrt(rate * (1 - rate))
    overall = deviations(took_part_TN.mean(), rate, one / math.sqrt(steps * num))
    each = [deviations(mean, rate, one / math.sqrt(steps)) for mean in took_part_TN.mean(axis=0)]
    return max(overall, *each) > SIGMAS


def size_variance_is_off(took_part_TN: np.ndarray, rate: float) -> bool:
    """Whether the variance of the batch size is not N q (1 − q), as of independent draws."""
    steps, num = took_part_TN.shape
    expected = num * rate * (1 - rate)
    sizes = took_part_TN.sum(axis=1)
    # Var of a sample variance: (μ4 − σ⁴)/T, with μ4 = σ²(1 + 3σ² − 6σ²/N) of a binomial.
    fourth = expected * (1 + (3 - 6 / num) * expected)
    return deviations(sizes.var(), expected, math.sqrt((fourth - expected**2) / steps)) > SIGMAS


def mean_covariance(took_part_TN: np.ndarray, shift: int) -> float:
    """The mean of Cov(record i, record i + shift) over all i, going round."""
    centred = took_part_TN - took_part_TN.mean()
    return float((centred * np.roll(centred, shift, axis=1)).mean())
