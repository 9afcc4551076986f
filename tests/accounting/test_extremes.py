"""No parameters are too far out, and Rényi DP is right and never below PLD."""

from __future__ import annotations

import functools
import math
import resource
import time
from itertools import pairwise
from pathlib import Path

import dp_accounting as dpa
import numpy as np
import pytest
from brute_force import renyi_between
from forked import Forked
from tiny_run import ADD, REPLACE

from tacit import epsilon
from tacit.accounting import Plan, epsilon_rdp
from tacit.accounting.composition import COARSE, FINE
from tacit.accounting.pld import gaussian_epsilon
from tacit.accounting.rdp import ORDERS, renyi_curve
from tacit.sampling import (
    MiniSets,
    Poisson,
    RevealedSampleDpEvent,
    ShuffledEpochs,
    WithoutReplacement,
)

SCHEMES = [
    (Poisson(0.01), ADD),
    (Poisson(0.01), REPLACE),
    (WithoutReplacement(1000, 10), REPLACE),
    (MiniSets(100, 10, chosen=1), REPLACE),
    (ShuffledEpochs(100), REPLACE),
]
ALL_SCHEMES = pytest.mark.parametrize(("scheme", "relation"), SCHEMES)


@pytest.mark.parametrize(
    ("z", "q", "relation"),
    [
        (0.05, 1e-6, ADD),
        (0.05, 0.02, REPLACE),
        (0.05, 1.0, ADD),
        (1.0, 1e-6, REPLACE),
        (1.0, 0.02, ADD),
        (1000.0, 1e-6, ADD),
        (1000.0, 0.02, REPLACE),
        (1000.0, 1.0, REPLACE),
    ],
)
def test_far_corners_are_quick_and_small(z, q, relation):
    def corners():
        held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        for steps, delta in ((1, 0.5), (100_000, 1e-12)):
            started = time.perf_counter()
            found = epsilon(z, Poisson(q), steps, delta=delta, relation=relation)
            assert time.perf_counter() - started < 10
            assert 0 <= found < math.inf
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held

    how, grown = Forked(corners).result()
    assert how == "done", grown
    assert grown < 2 * 1024**3


@ALL_SCHEMES
@pytest.mark.parametrize("account", [epsilon, epsilon_rdp])
def test_no_noise_and_no_steps(account, scheme, relation):
    assert account(0.0, scheme, 5, delta=1e-5, relation=relation) == math.inf
    assert account(1.0, scheme, 0, delta=1e-5, relation=relation) == 0
    assert account(0.0, scheme, 0, delta=1e-5, relation=relation) == 0


@ALL_SCHEMES
@pytest.mark.parametrize("account", [epsilon, epsilon_rdp])
def test_monotone_in_noise_steps_and_delta(account, scheme, relation):
    @functools.cache
    def at(z, steps, delta):
        return account(z, scheme, steps, delta=delta, relation=relation)

    grids = {
        "z": [at(z, 300, 1e-5) for z in (50.0, 5.0, 1.0, 0.2)],
        "steps": [at(1.0, n, 1e-5) for n in (0, 1, 50, 300, 301, 5000)],
        "delta": [at(1.0, 300, d) for d in (0.5, 1e-5, 1e-9, 1e-12, 1e-13, 1e-30)],
    }
    for values in grids.values():
        for less, more in pairwise(values):
            assert less <= more * (1 + 1e-4)  # grids change with the parameters
        assert values[0] < values[-1]


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("account", [epsilon, epsilon_rdp])
def test_monotone_in_the_sampling_rate(account, relation):
    rates = (1e-6, 1e-3, 0.01, 0.3, 0.9, 0.999999, 1.0)
    found = [account(1.0, Poisson(q), 100, delta=1e-5, relation=relation) for q in rates]
    for less, more in pairwise(found):
        assert less <= more * (1 + 1e-4)


@pytest.mark.parametrize("delta", [1e-13, 1e-30, 1e-200])
def test_a_tiny_delta_is_within_reach(delta):
    found = epsilon(1.0, Poisson(0.01), 100, delta=delta)
    by_renyi = epsilon_rdp(1.0, Poisson(0.01), 100, delta=delta)
    assert 0.8 * by_renyi <= found <= by_renyi
    assert found >= epsilon(1.0, Poisson(0.01), 100, delta=1e-12)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
@pytest.mark.parametrize("account", [epsilon, epsilon_rdp])
def test_a_delta_that_is_no_delta(account, delta):
    with pytest.raises(ValueError, match="delta"):
        account(1.0, Poisson(0.01), 10, delta=delta)


@pytest.mark.parametrize("account", [epsilon, epsilon_rdp])
def test_noise_that_is_no_noise(account):
    for z in (-1.0, math.nan):
        with pytest.raises(ValueError, match="noise multiplier"):
            account(z, Poisson(0.01), 10, delta=1e-5)


def test_endless_noise_is_perfect_privacy():
    assert epsilon(math.inf, Poisson(0.5), 10, delta=1e-5) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("z", [1e-4, 1e-9, 1e-160])
@pytest.mark.parametrize("of", [epsilon, epsilon_rdp])
@pytest.mark.parametrize("scheme", [Poisson(0.01), WithoutReplacement(100, 10)])
def test_noise_too_little_for_floating_point_is_none(of, z, scheme):
    relation = REPLACE if isinstance(scheme, WithoutReplacement) else ADD
    assert of(z, scheme, 10, delta=1e-5, relation=relation) == math.inf


@pytest.mark.parametrize("of", [epsilon, epsilon_rdp])
def test_a_gaussian_alone_goes_on_further(of):
    """ε ≈ T/2z² where noise is next to nothing, and ∞ where that is no number any more."""
    assert of(1e-9, Poisson(1.0), 10, delta=1e-5) >= 10 / (2 * 1e-18)
    assert of(1e-160, Poisson(1.0), 10, delta=1e-5) == math.inf


# The Rényi side: right where it can be integrated, and never below PLD.


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


@pytest.mark.parametrize("scheme", [Poisson(0.3), WithoutReplacement(50, 7)])
@pytest.mark.parametrize("grid", [COARSE, FINE])
def test_losses_that_overflow_a_grid_are_no_error(scheme, grid):
    """ε is ∞ on that grid, which is never too small: progress bars use the coarse one."""
    for z in (1e-3, 2.38e-3, 1e-2):
        plan = Plan(scheme, z, REPLACE, 8)
        assert plan.epsilon_of_count(8, 1e-5, grid) > 1e4
