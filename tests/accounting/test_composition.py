"""ε of long runs with tiny rates: an upper bound, close to the truth, and quick."""

from __future__ import annotations

import math
import time

import dp_accounting as dpa
import numpy as np
import pytest
from brute_force import delta_between, deltas_of_losses, epsilon_by_inversion
from dp_accounting.pld import privacy_loss_distribution as dpa_pld
from tiny_run import ADD, REPLACE

from tacit import Budget, calibrate, epsilon
from tacit.accounting import epsilon_rdp
from tacit.accounting.dominating_pairs import Losses, Replaced, Sampled
from tacit.sampling import Poisson

MILLION = 10**6


def pair_of(rate, relation):
    if relation is ADD:
        return [(1 - rate, 0.0), (rate, 1.0)], [(1.0, 0.0)]
    return [(1 - rate, 0.0), (rate, 0.5)], [(1 - rate, 0.0), (rate, -0.5)]


@pytest.mark.parametrize(
    ("rate", "z", "steps", "delta", "relation"),
    [
        (1e-5, 0.5, MILLION, 1e-5, REPLACE),
        (1e-2, 1.0, 1000, 1e-5, ADD),
        (1e-3, 2.0, 100_000, 1e-10, REPLACE),
        (1e-4, 1.0, MILLION, 1e-8, REPLACE),
    ],
)
def test_it_is_just_above_the_truth_by_inversion(rate, z, steps, delta, relation):
    """Against an integral in the complex plane, which knows no grid and no window."""
    exact = epsilon_by_inversion(*pair_of(rate, relation), z, steps, delta)
    found = epsilon(z, Poisson(rate), steps, delta=delta, relation=relation)
    assert exact * (1 - 2e-6) <= found <= exact * 1.001


def test_the_case_that_was_twice_too_high():
    found = epsilon(0.5, Poisson(1e-5), MILLION, delta=1e-5, relation=REPLACE)
    assert 0.06408034 <= found < 0.0641  # 0.06408034 by inversion; it was 0.1298


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("rate", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize(("z", "delta"), [(0.4, 1e-10), (1.0, 1e-5), (10.0, 1e-8)])
def test_a_million_steps_are_quick_and_below_renyi(rate, z, delta, relation):
    started = time.process_time()
    found = epsilon(z, Poisson(rate), MILLION, delta=delta, relation=relation)
    assert time.process_time() - started < 3  # 0.1 to 1 s on a free core
    assert 0 < found <= epsilon_rdp(z, Poisson(rate), MILLION, delta=delta, relation=relation)


def test_noise_for_a_million_steps_is_found_in_seconds():
    budget, poisson = Budget(1.0, 1e-8), Poisson(1e-4)
    started = time.process_time()
    z = calibrate(budget, poisson, MILLION)
    assert time.process_time() - started < 20
    assert epsilon(z, poisson, MILLION, delta=1e-8) <= 1.0
    assert epsilon(z * 0.9999, poisson, MILLION, delta=1e-8) > 1.0


@pytest.mark.parametrize(
    ("rate", "z", "steps"), [(0.01, 1.0, 100), (0.1, 0.7, 20), (0.02, 0.6, 300)]
)
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_it_is_between_dp_accounting_s_two_estimates(rate, z, steps, delta):
    low, high = (
        dpa_pld.from_gaussian_mechanism(
            z,
            sampling_prob=rate,
            value_discretization_interval=1e-4,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,
        )
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
        for pessimistic in (False, True)
    )
    found = epsilon(z, Poisson(rate), steps, delta=delta)
    assert low <= found <= high * (1 + 1e-5) + 1e-6


# The atoms of one step.

PAIRS = pytest.mark.parametrize(
    ("pair", "p", "q"),
    [
        (Sampled(0.8, 0.3), [(0.7, 0.0), (0.3, 1.0)], [(1.0, 0.0)]),
        (Sampled(0.5, 1e-4), [(1 - 1e-4, 0.0), (1e-4, 1.0)], [(1.0, 0.0)]),
        (Sampled(2.0, 1.0), [(1.0, 1.0)], [(1.0, 0.0)]),
        (Replaced(0.6, 0.2), [(0.8, 0.0), (0.2, 0.5)], [(0.8, 0.0), (0.2, -0.5)]),
    ],
)
EPSILONS = np.array([1e-4, 0.01, 0.1, 0.3, 1.0, 2.0])


@PAIRS
@pytest.mark.parametrize("step", [0.3, 0.01, 1e-4])
@pytest.mark.parametrize("reverse", [False, True])
def test_atoms_never_have_a_smaller_delta(pair, p, q, step, reverse):
    losses = pair.losses(step, 1e-18, reverse)
    assert losses.masses.min() >= 0
    assert losses.masses.sum() + losses.infinity == pytest.approx(1, abs=1e-9)
    exact = delta_between(*((q, p) if reverse else (p, q)), pair.z, EPSILONS)
    found = deltas_of_losses(losses, EPSILONS)
    assert np.all(found >= exact - 1e-7)
    if step < 1e-3:
        np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-8)


@PAIRS
def test_atoms_keep_both_masses(pair, p, q):
    """Σ P(l)·e^(−l) is the mass of Q: this is what makes rounding a spread and not a shift."""
    losses = pair.losses(1e-3, 1e-18)
    assert math.fsum(losses.masses * np.exp(-losses.values)) == pytest.approx(1, abs=1e-8)


def test_losses_that_are_rounded_down_would_be_seen(monkeypatch):
    """The planted mistake: every atom one grid point lower."""
    honest = Sampled.losses

    def lower(self, step, tail, reverse=False):
        losses = honest(self, step, tail, reverse)
        return Losses(step, losses.first - 1, losses.masses, losses.infinity)

    case = (1.0, Poisson(1e-2), 1000)
    exact = epsilon_by_inversion(*pair_of(1e-2, ADD), 1.0, 1000, 1e-5)
    monkeypatch.setattr(Sampled, "losses", lower)
    assert epsilon(*case, delta=1e-5) < exact * (1 - 2e-6)


def test_a_prelude_and_two_samplings_compose():
    """A Gaussian of multiplier 5 before 1000 sampled steps, against dp-accounting."""
    prelude = (dpa.GaussianDpEvent(5.0),)
    found = epsilon(1.0, Poisson(1e-2), 1000, delta=1e-6, prelude=prelude)
    theirs = dpa.pld.PLDAccountant(value_discretization_interval=1e-5)
    theirs.compose(prelude[0])
    theirs.compose(dpa.PoissonSampledDpEvent(1e-2, dpa.GaussianDpEvent(1.0)), 1000)
    assert found == pytest.approx(theirs.get_epsilon(1e-6), rel=1e-4)
