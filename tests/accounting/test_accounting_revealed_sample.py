"""Mini-sets with a bound a record: the others in the set may give the draw away."""

import dp_accounting as dpa
import numpy as np
import pytest
from hockey_stick import delta_between, gaussian_delta
from tiny_run import ADD, REPLACE

from tacit import epsilon
from tacit.accounting.pld import privacy_loss
from tacit.sampling import MiniSets, Poisson, RevealedSampleDpEvent
from tacit.sampling.scheme import Unit

EPSILONS = np.array([0.0, 0.2, 1.0, 2.0, 4.0])
CASES = [(0.1, 0.5), (0.5, 1.0), (0.01, 0.3), (1.0, 1.0)]


def delta_of(event, relation):
    return np.array(privacy_loss(event, relation).get_delta_for_epsilon(EPSILONS))


@pytest.mark.parametrize(("p", "z"), CASES)
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_one_step_is_p_times_a_gaussian(p, z, relation):
    claimed = delta_of(RevealedSampleDpEvent(p, dpa.GaussianDpEvent(z)), relation)
    exact = np.array([p * gaussian_delta(e, 1 / z) for e in EPSILONS])
    np.testing.assert_allclose(claimed, exact, rtol=1e-3, atol=1e-10)
    assert np.all(claimed >= exact - 1e-12)


def set_of_two(q, other, z):
    """The sum when a set of two is drawn with probability q, one record adding or not adding 1."""
    return [(1 - q, 0.0), (q, other + 1.0)], [(1 - q, 0.0), (q, other)]


def test_a_companion_far_away_beats_poisson_amplification():
    """The counterexample that makes the weaker event necessary."""
    q, z = 0.1, 0.5
    poisson = delta_of(dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z)), ADD)
    revealed = delta_of(RevealedSampleDpEvent(q, dpa.GaussianDpEvent(z)), ADD)
    worst = delta_between(*set_of_two(q, 10.0, z), z, EPSILONS)
    assert np.all(worst[2:] > 2 * poisson[2:])
    assert np.all(worst <= revealed + 1e-7)
    np.testing.assert_allclose(worst, revealed, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("other", [-1.0, 0.0, 0.3, 1.0, 3.0, 30.0])
@pytest.mark.parametrize(("q", "z"), CASES)
def test_no_companion_beats_the_revealed_sample(other, q, z):
    bound = delta_of(RevealedSampleDpEvent(q, dpa.GaussianDpEvent(z)), ADD)
    p, r = set_of_two(q, other, z)
    for first, second in ((p, r), (r, p)):
        assert np.all(delta_between(first, second, z, EPSILONS) <= bound + 1e-7)


def test_sets_cost_more_than_records_unless_they_are_records():
    sets = MiniSets(100, 10, rate=0.01)
    ones = MiniSets(1000, 1, rate=0.01)
    poisson = epsilon(1.0, Poisson(0.01), 100, delta=1e-5)
    assert epsilon(1.0, sets, 100, delta=1e-5) > 1.5 * poisson
    assert epsilon(1.0, ones, 100, delta=1e-5) == poisson


def test_a_bound_on_the_whole_set_is_amplified():
    sets = MiniSets(100, 10, rate=0.01)
    found = epsilon(1.0, sets, 100, delta=1e-5, relation=REPLACE, unit=Unit.MINI_SET)
    assert found == epsilon(1.0, Poisson(0.01), 100, delta=1e-5, relation=REPLACE)
