"""The Rényi side: right where it can be integrated, and never below PLD."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from hockey_stick import renyi_between
from tiny_run import ADD, REPLACE

from tacit import epsilon
from tacit.accounting import epsilon_rdp
from tacit.accounting.pld import gaussian_epsilon
from tacit.accounting.rdp import ORDERS, renyi_curve
from tacit.sampling import (
    MiniSets,
    Poisson,
    RevealedSampleDpEvent,
    ShuffledEpochs,
    WithoutReplacement,
)


def sampled(q, z):
    return dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z))


@pytest.mark.parametrize("order", [1.1, 1.5, 2.5, 8.0, 32, 63])
@pytest.mark.parametrize(
    ("q", "z"), [(0.01, 1.0), (0.3, 0.7), (0.9, 2.0), (0.05, 0.3), (0.99, 5.0)]
)
def test_poisson_replace_curve(q, z, order):
    curve = renyi_curve(sampled(q, z), REPLACE)[ORDERS.index(order)]
    exact = renyi_between([(1 - q, 0), (q, 0.5)], [(1 - q, 0), (q, -0.5)], z, order)
    assert curve == pytest.approx(exact, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("order", [1.1, 2.5, 8.0, 32])
def test_poisson_add_or_remove_curve(order):
    q, z = 0.1, 0.8
    curve = renyi_curve(sampled(q, z), ADD)[ORDERS.index(order)]
    mixed, alone = [(1 - q, 0), (q, 1.0)], [(1.0, 0.0)]
    exact = max(renyi_between(mixed, alone, z, order), renyi_between(alone, mixed, z, order))
    assert curve >= exact * (1 - 1e-9)
    # A fractional order's series stops at an upper bound, or is left out when it does not stop.
    assert curve == math.inf or curve == pytest.approx(exact, rel=2e-2)


@pytest.mark.parametrize("order", [1.1, 2.5, 8.0, 32])
def test_revealed_sample_curve(order):
    p, z = 0.2, 0.9
    curve = renyi_curve(RevealedSampleDpEvent(p, dpa.GaussianDpEvent(z)), ADD)
    exact = math.log(1 - p + p * math.exp(order * (order - 1) / (2 * z * z))) / (order - 1)
    assert curve[ORDERS.index(order)] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("z", [0.5, 5.0, 40.0])
def test_full_batches_have_the_gaussian_s_curve(z, relation):
    """At q = 1 the integrand's peak is at 2α − 1, not at α."""
    expected = np.array(ORDERS) / (2 * z * z)
    np.testing.assert_allclose(renyi_curve(sampled(1.0, z), relation), expected, rtol=1e-6)


@pytest.mark.parametrize("order", [192, 512])
def test_nearly_full_batches_at_high_orders(order):
    q, z = 1 - 1e-6, 5.0
    curve = renyi_curve(sampled(q, z), REPLACE)[ORDERS.index(order)]
    exact = renyi_between([(1 - q, 0), (q, 0.5)], [(1 - q, 0), (q, -0.5)], z, order)
    assert curve >= exact * (1 - 1e-6)


def random_runs(count):
    draws = np.random.default_rng(0)
    for _ in range(count):
        q = float(10 ** draws.uniform(-4, -0.3))
        sets = int(draws.integers(5, 500))
        scheme, relation = [
            (Poisson(q), ADD),
            (Poisson(q), REPLACE),
            (WithoutReplacement(1000, max(1, round(1000 * q))), REPLACE),
            (MiniSets(sets, 4, chosen=max(1, round(sets * q))), REPLACE),
            (MiniSets(sets, 4, rate=q), ADD),
            (ShuffledEpochs(sets), REPLACE),
        ][draws.integers(6)]
        z = float(10 ** draws.uniform(-0.4, 1.5))
        steps = int(10 ** draws.uniform(0, 3.7))
        delta = float(10 ** draws.uniform(-9, -2))
        yield z, scheme, steps, delta, relation


@pytest.mark.parametrize(("z", "scheme", "steps", "delta", "relation"), list(random_runs(30)))
def test_renyi_is_never_below_pld(z, scheme, steps, delta, relation):
    by_pld = epsilon(z, scheme, steps, delta=delta, relation=relation)
    by_rdp = epsilon_rdp(z, scheme, steps, delta=delta, relation=relation)
    # Grids round tiny losses up: by at most 1e-4, or 0.2%.
    assert by_pld <= by_rdp * 1.002 + 1e-4


@pytest.mark.parametrize(
    ("z", "q", "relation"), [(0.3, 1e-6, ADD), (0.3, 1e-3, REPLACE), (1.0, 1e-3, ADD)]
)
def test_pld_is_the_tighter_also_where_its_rounding_is_felt(z, q, relation):
    """δ = 1e-12 after 1e5 steps. Both bounds hold for a fixed plan, so their minimum does."""
    settings = {"delta": 1e-12, "relation": relation}
    by_pld = epsilon(z, Poisson(q), 100_000, **settings)
    assert by_pld <= epsilon_rdp(z, Poisson(q), 100_000, **settings) * 1.002


def test_a_divergence_below_roundings_is_not_none():
    """One step of q = 1e-7, z = 1e4 is below float64's digits; 10⁸ of them are not."""
    steps, rate, z, delta = 10**8, 1e-7, 1e4, 1e-10
    found = epsilon_rdp(z, Poisson(rate), steps, delta=delta)
    assert found >= gaussian_epsilon(z / (rate * math.sqrt(steps)), delta)
