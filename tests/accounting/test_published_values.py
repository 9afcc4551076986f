"""Figures that other people, other programs and closed forms arrive at."""

from __future__ import annotations

import math

import dp_accounting as dpa
import numpy as np
import pytest
from brute_force import gaussian_epsilon
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant
from tiny_run import ADD, REPLACE

from tacit import Budget, calibrate, epsilon
from tacit.accounting import epsilon_rdp
from tacit.accounting.plan import epsilon_of_event
from tacit.accounting.rdp import ORDERS, epsilon_of_curve, renyi_curve
from tacit.sampling import MiniSets, Poisson, ShuffledEpochs, WithoutReplacement

# Figures of papers and their programs, at δ = 1e-5.


DELTA = 1e-5

# records, batch, epochs, noise, ε by PLD, ε by RDP
POISSON = [
    (50_000, 1024, 30, 1.54, 2.387, 2.61),
    (60_000, 2048, 40, 2.15, 2.390, 2.60),
    (60_000, 512, 40, 1.23, 2.364, 2.58),
]


@pytest.mark.parametrize(("size", "batch", "epochs", "z", "by_pld", "by_rdp"), POISSON)
def test_poisson_epsilon(size, batch, epochs, z, by_pld, by_rdp):
    scheme, steps = Poisson(batch / size), round(epochs * size / batch)
    assert epsilon(z, scheme, steps, delta=DELTA) == pytest.approx(by_pld, rel=5e-3)
    assert epsilon_rdp(z, scheme, steps, delta=DELTA) == pytest.approx(by_rdp, rel=5e-3)


def test_poisson_epsilon_of_a_long_run():
    assert epsilon(1.5, Poisson(0.04), 2250, delta=DELTA) == pytest.approx(6.769, rel=5e-3)
    assert epsilon_rdp(1.5, Poisson(0.04), 2250, delta=DELTA) == pytest.approx(7.329, rel=5e-3)


@pytest.mark.parametrize(("sigma", "expected"), [(2.5, 2.083), (1.5, 9.697)])
def test_without_replacement_epsilon(sigma, expected):
    scheme, steps = WithoutReplacement(54_000, 64), round(50 * 54_000 / 64)
    found = epsilon(sigma / math.sqrt(8), scheme, steps, delta=DELTA, relation=REPLACE)
    assert found == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    ("size", "batch", "epochs", "expected"),
    [(50_000, 1024, 30, 1.32), (60_000, 2048, 40, 1.81), (60_000, 512, 40, 1.07)],
)
def test_calibrated_noise_for_epsilon_three(size, batch, epochs, expected):
    z = calibrate(Budget(3.0, DELTA), Poisson(batch / size), round(epochs * size / batch))
    assert round(z, 2) == expected


@pytest.mark.parametrize(
    ("z", "q", "steps", "delta", "expected"),
    [(4.0, 0.01, 10_000, 1e-5, 1.2), (1.1, 256 / 60_000, 14_063, 1e-5, 2.92)],
)
def test_the_literature_s_rdp_figures_are_upper_bounds(z, q, steps, delta, expected):
    """MNIST at noise 1.1, 60 epochs of 256: the tutorial's 3.0; Abadi et al.: 1.26."""
    assert epsilon(z, Poisson(q), steps, delta=delta) <= expected * 1.06
    assert epsilon_rdp(z, Poisson(q), steps, delta=delta) <= expected * 1.06


# Facts that dp-accounting states of its own accountants.


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


# Our grids are our own; what they compute is what Google's accountants compute.


def random_configurations(count, seed=0):
    draws = np.random.default_rng(seed)
    for _ in range(count):
        yield (
            float(np.exp(draws.uniform(math.log(0.4), math.log(8)))),
            float(np.exp(draws.uniform(math.log(1e-4), math.log(0.3)))),
            int(np.exp(draws.uniform(0, math.log(5000)))),
            float(10 ** draws.uniform(-8, -3)),
        )


def by_google(z, q, steps, delta, interval):
    one = pld.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=interval, use_connect_dots=True
    )
    return one.self_compose(steps).get_epsilon_for_delta(delta)


@pytest.mark.parametrize(("z", "q", "steps", "delta"), list(random_configurations(8)))
def test_poisson_epsilon_is_googles(z, q, steps, delta):
    ours = epsilon(z, Poisson(q), steps, delta=delta)
    finer = by_google(z, q, steps, delta, interval=min(1e-4, max(2e-6, ours / 2e4)))
    assert ours >= finer * (1 - 1e-4) - 2e-6
    assert ours == pytest.approx(finer, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize(("z", "q", "steps", "delta"), list(random_configurations(12, seed=1)))
def test_poisson_epsilon_by_rdp_is_googles(z, q, steps, delta):
    accountant = RdpAccountant(ORDERS, dpa.NeighboringRelation.ADD_OR_REMOVE_ONE)
    one = dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z))
    accountant.compose(dpa.SelfComposedDpEvent(one, steps))
    ours = epsilon_rdp(z, Poisson(q), steps, delta=delta, relation=ADD)
    assert ours == pytest.approx(accountant.get_epsilon(delta), rel=2e-3)


@pytest.mark.parametrize(("z", "q", "steps", "delta"), list(random_configurations(3, seed=2)))
def test_their_event_accountant_and_ours_agree_on_a_composition(z, q, steps, delta):
    """A Gaussian release, then sampled steps: the shape of a run with private statistics."""
    from tacit.accounting.plan import epsilon_of_event

    event = dpa.ComposedDpEvent(
        [
            dpa.GaussianDpEvent(4 * z),
            dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z)), steps),
        ]
    )
    theirs = dpa.pld.PLDAccountant(
        dpa.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4
    )
    theirs.compose(event)
    expected = theirs.get_epsilon(delta)
    ours = epsilon_of_event(event, delta, ADD)
    assert ours <= expected * 1.002 + 1e-6
    # Their fixed grid rounds thousands of tiny losses up; ours may only be finer, not lower.
    assert ours >= expected * 0.9


# Without sampling the answer is known in closed form.  [Balle & Wang 2018]


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("z", "steps"),
    [(0.05, 1), (0.05, 1000), (0.3, 37), (1.0, 1), (4.0, 100_000), (1000.0, 1), (1000.0, 100_000)],
)
def test_full_batches_are_gaussian_mechanisms(z, steps, relation):
    for delta in (1e-12, 1e-9, 1e-5, 0.01, 0.5):
        exact = gaussian_epsilon(delta, math.sqrt(steps) / z)
        found = epsilon(z, Poisson(1.0), steps, delta=delta, relation=relation)
        assert found >= exact * (1 - 1e-9)
        assert found == pytest.approx(exact, rel=3e-3, abs=1e-6)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.01])
def test_shuffled_epochs_are_one_gaussian_an_epoch(delta):
    for epochs in (1, 7):
        for steps in (epochs * 10, epochs * 10 - 9):
            found = epsilon(2.0, ShuffledEpochs(10), steps, delta=delta, relation=REPLACE)
            assert found == pytest.approx(gaussian_epsilon(delta, math.sqrt(epochs) / 2), rel=1e-4)


# These take the road of convolutions to the same place, so they check its rounding.
CONVOLVED = {
    "everybody drawn without replacement": WithoutReplacement(10, 10),
    "every mini-set drawn, and revealed": MiniSets(10, 5, rate=1.0),
    "everybody but one in a million": Poisson(1 - 1e-9),
}


@pytest.mark.parametrize("scheme", CONVOLVED.values(), ids=list(CONVOLVED))
@pytest.mark.parametrize(
    ("z", "steps", "delta"),
    [(1.0, 1, 1e-9), (30.0, 100, 1e-12), (30.0, 100, 0.1), (100.0, 10_000, 1e-8)],
)
def test_convolutions_end_where_the_closed_form_does(scheme, z, steps, delta):
    exact = gaussian_epsilon(delta, math.sqrt(steps) / z)
    found = epsilon(z, scheme, steps, delta=delta, relation=REPLACE)
    assert found >= exact * (1 - 1e-4)
    assert found == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("scheme", CONVOLVED.values(), ids=list(CONVOLVED))
@pytest.mark.parametrize(("z", "delta"), [(300.0, 1e-12), (300.0, 1e-10), (1000.0, 1e-10)])
def test_the_rounding_of_a_hundred_thousand_convolutions_is_paid_for(scheme, z, delta):
    """ε must stay an upper bound where T roundings of 1e-16 are no longer small beside δ."""
    steps = 100_000
    exact = gaussian_epsilon(delta, math.sqrt(steps) / z)
    found = epsilon(z, scheme, steps, delta=delta, relation=REPLACE)
    assert found >= exact * (1 - 1e-4)
