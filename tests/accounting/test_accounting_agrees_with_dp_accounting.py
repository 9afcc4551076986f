"""Our grids are our own; what they compute is what Google's accountants compute."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant
from tiny_run import ADD

from tacit import epsilon
from tacit.accounting import epsilon_rdp
from tacit.accounting.rdp import ORDERS
from tacit.sampling import Poisson


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
def test_poisson_epsilon(z, q, steps, delta):
    ours = epsilon(z, Poisson(q), steps, delta=delta)
    finer = by_google(z, q, steps, delta, interval=min(1e-4, max(2e-6, ours / 2e4)))
    assert ours >= finer * (1 - 1e-4) - 2e-6
    assert ours == pytest.approx(finer, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize(("z", "q", "steps", "delta"), list(random_configurations(12, seed=1)))
def test_poisson_epsilon_by_rdp(z, q, steps, delta):
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
