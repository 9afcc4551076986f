"""Trade-off curves: what they must be like, and what they are where that is known."""

import math

import numpy as np
import pytest
from scipy.stats import norm
from tiny_run import ADD, REPLACE

from tacit import epsilon, trade_off
from tacit.accounting import gaussian_dp_mu
from tacit.errors import UnsupportedEvent
from tacit.sampling import MiniSets, Poisson, ShuffledEpochs, WithoutReplacement

ALPHAS = np.linspace(0, 1, 801)
RUNS = {
    "gaussian": (2.0, Poisson(1.0), 1, ADD),
    "poisson": (1.0, Poisson(0.02), 300, ADD),
    "poisson, replace": (1.0, Poisson(0.3), 10, REPLACE),
    "without replacement": (0.8, WithoutReplacement(100, 5), 50, REPLACE),
    "revealed": (1.0, MiniSets(20, 5, chosen=2), 10, ADD),
    "shuffled": (3.0, ShuffledEpochs(10), 35, REPLACE),
    "weak": (0.1, Poisson(0.5), 10, ADD),
    "strong": (100.0, Poisson(0.01), 10, ADD),
}
ALL_RUNS = pytest.mark.parametrize(
    ("z", "scheme", "steps", "relation"), RUNS.values(), ids=list(RUNS)
)


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 3.0, 8.0])
def test_the_gaussian_s_curve_is_g_mu(mu):
    """G_μ(α) = Φ(Φ⁻¹(1 − α) − μ)  [Dong 2022, Def. 2.6]."""
    found = trade_off(1 / mu, Poisson(1.0), 1)(ALPHAS)
    exact = norm.cdf(norm.ppf(1 - ALPHAS) - mu)
    assert np.all(found <= exact + 1e-6)
    assert np.max(np.abs(found - exact)) < 2e-3


@ALL_RUNS
def test_it_is_a_symmetric_trade_off_function(z, scheme, steps, relation):
    f = trade_off(z, scheme, steps, relation=relation)(ALPHAS)
    assert np.all(np.diff(f) <= 1e-9)
    assert np.all(np.diff(f, 2) >= -1e-9)
    assert f[0] <= 1
    assert np.all(f <= 1 - ALPHAS + 1e-12)
    assert np.all(f >= 0)
    inverse = np.interp(ALPHAS, f[::-1], ALPHAS[::-1], left=1.0)
    inside = (f > 0.01) & (f < f[0] - 0.01)
    again = np.interp(f[inside], ALPHAS, f)
    np.testing.assert_allclose(again, ALPHAS[inside], atol=6e-3)
    assert inverse.shape == f.shape


@ALL_RUNS
def test_it_says_the_same_as_epsilon(z, scheme, steps, relation):
    """f(α) ≥ max(1 − δ − e^ε α, e^(−ε)(1 − δ − α)) for every (ε, δ)."""
    curve = trade_off(z, scheme, steps, relation=relation)(ALPHAS)
    for delta in (1e-5, 1e-2, 0.2):
        at = epsilon(z, scheme, steps, delta=delta, relation=relation)
        line = 1 - delta - math.exp(at) * ALPHAS
        mirrored = math.exp(-at) * (1 - delta - ALPHAS)
        assert np.all(curve >= np.maximum(line, mirrored) - 1e-4)


def test_no_steps_tell_nothing_and_no_noise_tells_all():
    np.testing.assert_allclose(trade_off(1.0, Poisson(0.1), 0)(ALPHAS), 1 - ALPHAS, atol=1e-9)
    np.testing.assert_array_equal(trade_off(0.0, Poisson(0.1), 1)(ALPHAS), 0 * ALPHAS)


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_a_type_one_error_is_a_probability(alpha):
    with pytest.raises(ValueError, match="probability"):
        trade_off(1.0, Poisson(1.0), 1)(alpha)


def test_the_central_limit_of_poisson():
    found = gaussian_dp_mu(1.3, Poisson(0.01), 1000)
    assert float(found) == pytest.approx(0.01 * math.sqrt(1000 * (math.exp(1.3**-2) - 1)))
    assert found.approximate


@pytest.mark.parametrize(("sigma", "expected"), [(2.5, 0.52), (1.5, 1.99)])
def test_the_central_limit_without_replacement(sigma, expected):
    """μ = √2·h·√(E·m/N), as the paper on batch clipping quotes it."""
    z = sigma / math.sqrt(8)
    found = gaussian_dp_mu(z, WithoutReplacement(54_000, 64), round(50 * 54_000 / 64))
    assert round(float(found), 2) == expected
    assert found.approximate
    h = math.sqrt(math.exp(z**-2) * norm.cdf(1.5 / z) + 3 * norm.cdf(-0.5 / z) - 2)
    if sigma == 2.5:
        assert h == pytest.approx(1.513, abs=2e-3)
    assert float(found) == pytest.approx(math.sqrt(2) * h * math.sqrt(50 * 64 / 54_000), rel=1e-3)


def test_the_limit_is_near_the_curve_of_a_long_run_and_is_no_bound():
    z, scheme, steps = 1.0, Poisson(0.05), 400
    limit = gaussian_dp_mu(z, scheme, steps)
    sure = trade_off(z, scheme, steps)(ALPHAS)
    assert np.max(np.abs(limit(ALPHAS) - sure)) < 0.04
    assert limit.epsilon(1e-5) < epsilon(z, scheme, steps, delta=1e-5)


def test_unamplified_epochs_are_exactly_gaussian():
    found = gaussian_dp_mu(2.0, ShuffledEpochs(10), 35)
    assert float(found) == pytest.approx(math.sqrt(4) / 2)
    assert not found.approximate


def test_the_limit_knows_that_a_revealed_set_is_not_amplified():
    """A CLT figure for mini-sets with a bound a record must not be Poisson's."""
    with pytest.raises(UnsupportedEvent, match="trade_off"):
        gaussian_dp_mu(1.0, MiniSets(100, 10, rate=0.01), 1000)


def test_strong_runs_overflow_nothing():
    found = gaussian_dp_mu(0.03, Poisson(0.01), 10)
    assert float(found) > 1
    assert gaussian_dp_mu(0.003, Poisson(0.01), 10).epsilon(1e-5) == math.inf
