"""What the paper's runs would have leaked had their batches been shuffled, from below.

An ε that holds for Poisson sampling need not hold for shuffled epochs of T batches. The attack of
Chua et al. 2024: every other record's gradient is −1, the one in question gives +1, or nothing
where it is missing. Against what all others alone would sum to, the batches of one epoch are

    P = (1/T)·Σ_t N(2·e_t, z²·I)   with the record,   Q = (1/T)·Σ_t N(e_t, z²·I)   without it,

since its place is known to be one batch short. Whoever looks at the largest of the T sums alone
sees numbers with the distribution functions

    P(max ≤ x) = Φ((x − 2)/z)·Φ(x/z)^(T−1),   Q(max ≤ x) = Φ((x − 1)/z)·Φ(x/z)^(T−1).

Cut into intervals, that is a pair of finite distributions; E epochs are their E-fold product, and
the ε at which δ is met is a LOWER bound on that of the whole run: forgetting and cutting only ever
hide something. The sum over epochs is by privacy loss distributions rounded the optimistic way.
"""

from __future__ import annotations

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from scipy.special import log_ndtr

_INTERVALS, _GRID = 4_000, 1e-3


def shuffled_epsilon(
    noise_multiplier: float, steps_per_epoch: int, epochs: int, delta: float
) -> float:
    """ε is at least this, a record being there or not with its place left empty."""
    z, T = noise_multiplier, steps_per_epoch
    edges = np.linspace(-8 * z, 2 + 12 * z, _INTERVALS)
    with_record, without = (
        _interval_masses(log_ndtr((edges - shift) / z) + (T - 1) * log_ndtr(edges / z))
        for shift in (2, 1)
    )
    seen = (with_record > 0) & (without > 0)
    loss = privacy_loss_distribution.from_two_probability_mass_functions(
        dict(enumerate(np.log(without[seen]))),
        dict(enumerate(np.log(with_record[seen]))),
        pessimistic_estimate=False,
        value_discretization_interval=_GRID,
        symmetric=False,
    )
    return float(loss.self_compose(epochs).get_epsilon_for_delta(delta))


def _interval_masses(log_distribution: np.ndarray) -> np.ndarray:
    """What lies between neighbouring edges, below the first and above the last."""
    below = np.concatenate([[0.0], np.exp(log_distribution), [1.0]])
    masses = np.diff(below)
    # A difference of numbers near 1 is rounded; small ones are left out, which only hides more.
    return np.where(masses > 1e-12, masses, 0.0)
