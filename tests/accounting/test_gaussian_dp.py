"""Gaussian DP: what papers quote is no guarantee, and an ε that protects nobody is named."""

import math

import numpy as np
import pytest
from brute_force import gaussian_delta
from scipy.stats import norm
from tiny_run import ADD, one_weight

from tacit import Budget, Run, epsilon, trade_off
from tacit.accounting import Plan, gaussian_dp_mu, gaussian_trade_off, no_privacy
from tacit.accounting.gaussian_dp import epsilon_of_no_privacy, no_privacy_note
from tacit.errors import UnsupportedEvent
from tacit.sampling import MiniSets, Poisson, ShuffledEpochs, WithoutReplacement
from tacit.training import summary_text

ALPHAS = np.linspace(0, 1, 801)


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


# Where ε protects nobody, everything that reports it says so, in the same words.


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_the_threshold_is_a_test_that_is_wrong_once_in_two_hundred(delta):
    at = epsilon_of_no_privacy(delta)
    mu = 2 * norm.ppf(0.995)
    assert gaussian_delta(at, mu) == pytest.approx(delta, rel=1e-5)
    curve = gaussian_trade_off(mu)
    assert curve.advantage == pytest.approx(0.99, abs=1e-6)
    assert curve([0.005])[0] == pytest.approx(0.005, abs=1e-5)
    assert no_privacy(at, delta)
    assert not no_privacy(at * 0.999, delta)


def test_what_people_use_is_not_called_so_and_what_protects_nobody_is():
    assert no_privacy_note(8.0, 1e-5) is None
    assert no_privacy_note(9.7, 1e-5) is None
    for spent in (34.6, 7.3e6, math.inf):
        assert no_privacy_note(spent, 1e-5).startswith("this is no privacy")


def finished(noise_multiplier):
    plan = Plan(Poisson(1.0), noise_multiplier, ADD, 1)
    return Run(
        model=one_weight(),
        loss=lambda outputs, targets: outputs.sum(),
        budget=Budget(1e6, 1e-5),
        plan=plan,
        steps=1,
        epsilon=plan.epsilon(1, 1e-5),
        epsilon_rdp=plan.epsilon_rdp(1, 1e-5),
        seconds=0.0,
        peak_memory_bytes=0,
        seeded=False,
        stopped="plan complete",
        notes=["a note"],
    )


def test_a_run_says_it_in_its_facts_and_in_its_table():
    loud, quiet = finished(0.1), finished(1.0)
    assert loud.facts()["notes"][0].startswith("this is no privacy")
    assert loud.facts()["notes"][1:] == ["a note"]
    assert "this is no privacy" in summary_text(loud.facts())
    assert quiet.facts()["notes"] == ["a note"]
    assert "no privacy" not in summary_text(quiet.facts())
