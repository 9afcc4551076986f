"""Facts that dp-accounting states of its own accountants, asked of ours."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from tiny_run import ADD, REPLACE

from tacit import Budget, calibrate, epsilon
from tacit.accounting.plan import epsilon_of_event
from tacit.accounting.rdp import ORDERS, epsilon_of_curve, renyi_curve
from tacit.sampling import Poisson

ONE = dpa.GaussianDpEvent(1.0)
BOTH = pytest.mark.parametrize("relation", [ADD, REPLACE])


def composed(*events):
    return dpa.ComposedDpEvent(list(events))


def epsilon_by_rdp(event, delta, relation):
    return epsilon_of_curve(renyi_curve(event, relation), delta)


@BOTH
@pytest.mark.parametrize("account", [epsilon_of_event, epsilon_by_rdp])
@pytest.mark.parametrize(
    "event",
    [
        composed(),
        dpa.NoOpDpEvent(),
        dpa.SelfComposedDpEvent(dpa.NoOpDpEvent(), 10),
        composed(dpa.NoOpDpEvent(), composed(dpa.NoOpDpEvent())),
        dpa.PoissonSampledDpEvent(0.0, ONE),
    ],
)
def test_nothing_costs_nothing(event, account, relation):
    for delta in (1e-12, 1e-5, 0.9):
        assert account(event, delta, relation) == 0


def test_a_sample_of_nobody_costs_nothing():
    event = dpa.SampledWithoutReplacementDpEvent(1000, 0, ONE)
    assert epsilon_by_rdp(event, 1e-5, REPLACE) == 0
    assert epsilon_of_event(event, 1e-5, REPLACE) == 0


@BOTH
@pytest.mark.parametrize("account", [epsilon_of_event, epsilon_by_rdp])
@pytest.mark.parametrize(
    "event",
    [
        dpa.NonPrivateDpEvent(),
        composed(dpa.NoOpDpEvent(), dpa.NonPrivateDpEvent()),
        dpa.SelfComposedDpEvent(dpa.NonPrivateDpEvent(), 10),
        dpa.GaussianDpEvent(0.0),
        dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(0.0)),
        composed(ONE, dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(0.0))),
    ],
)
def test_no_noise_is_no_privacy(event, account, relation):
    for delta in (1e-12, 1e-5, 0.9):
        assert account(event, delta, relation) == math.inf


def test_three_gaussians_of_root_three_are_one_of_one():
    wide = dpa.GaussianDpEvent(math.sqrt(3))
    event = composed(wide, dpa.SelfComposedDpEvent(wide, 2))
    assert epsilon_of_event(event, 0.126936, ADD) == pytest.approx(1.0, abs=1e-3)


def test_three_poisson_samples_however_they_are_nested():
    one = dpa.PoissonSampledDpEvent(0.2, dpa.GaussianDpEvent(0.5))
    for event in (composed(one, dpa.SelfComposedDpEvent(one, 2)), dpa.SelfComposedDpEvent(one, 3)):
        assert epsilon_of_event(event, 0.15594, ADD) == pytest.approx(1.0, abs=1e-3)
    assert epsilon(0.5, Poisson(0.2), 3, delta=0.15594) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("budget", "rate", "steps", "expected"),
    [
        (Budget(1.0, 0.78760074), 1.0, 1, 1 / 3),
        (Budget(1.0, 0.78760074), 1.0, 25, 10 / 6),
        (Budget(1.0, 1e-5), 0.01, 1, 0.67379294682),
        (Budget(1.0, 1e-5), 0.001, 25, 3.20956502598 / 6),
        (Budget(1.0, 1e-6), 1.0, 1, 4.224678889),  # the analytic Gaussian mechanism
    ],
)
def test_least_noise(budget, rate, steps, expected):
    found = calibrate(budget, Poisson(rate), steps)
    # theirs is a grid of 1e-4 in the loss; ours is rounded up to five digits
    assert found == pytest.approx(expected, rel=2e-3)
    assert epsilon(found, Poisson(rate), steps, delta=budget.delta) <= budget.epsilon


def test_the_renyi_curve_of_fifty_poisson_steps():
    one = dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(2.5))
    curve = renyi_curve(dpa.SelfComposedDpEvent(one, 50), ADD)
    at = [ORDERS.index(order) for order in (1.5, 2.5, 5)]
    known = [6.70579741e-04, 1.08548710e-03, 2.18075656e-03]
    np.testing.assert_allclose(curve[at], known, rtol=1e-4)


@BOTH
def test_the_renyi_curve_of_a_gaussian_is_a_line(relation):
    for z in (0.3, 1.0, 7.0):
        expected = np.array(ORDERS) / (2 * z * z)
        found = renyi_curve(dpa.GaussianDpEvent(z), relation)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_gaussians_add_up_in_inverse_squares():
    curve = renyi_curve(composed(dpa.GaussianDpEvent(2.71828), dpa.GaussianDpEvent(6.28319)), ADD)
    expected = np.array(ORDERS) / 2 * (2.71828**-2 + 6.28319**-2)
    np.testing.assert_allclose(curve, expected, rtol=1e-12)
