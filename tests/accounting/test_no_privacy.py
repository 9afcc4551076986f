"""Where ε protects nobody, everything that reports it says so, in the same words."""

import math

import pytest
from hockey_stick import gaussian_delta
from scipy.stats import norm
from tiny_run import ADD, one_weight

from tacit import Budget, Run
from tacit.accounting import Plan, gaussian_trade_off, no_privacy
from tacit.accounting.gaussian_dp import epsilon_of_no_privacy, no_privacy_note
from tacit.sampling import Poisson
from tacit.training import summary_text


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
