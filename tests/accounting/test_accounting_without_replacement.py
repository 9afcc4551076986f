"""Fixed-size batches: C_p(G) against every mixture that a small population can make."""

import math
from itertools import combinations

import dp_accounting as dpa
import numpy as np
import pytest
from hockey_stick import delta_between, gaussian_delta
from tiny_run import REPLACE

from tacit.accounting.pld import privacy_loss

EPSILONS = [0.0, 0.1, 0.5, 1.0, 2.0]
CASES = [(4, 2, 1.0), (4, 1, 0.5), (5, 3, 0.7), (6, 2, 0.4)]


def claimed_delta(population, size, z, epsilons=EPSILONS):
    event = dpa.SampledWithoutReplacementDpEvent(population, size, dpa.GaussianDpEvent(z))
    return np.array(privacy_loss(event, REPLACE).get_delta_for_epsilon(np.array(epsilons)))


def outputs(contributions, size):
    """All equally likely sums: the mixture that the mechanism really is."""
    sums = [sum(chosen) for chosen in combinations(contributions, size)]
    return [(1 / len(sums), total) for total in sums]


@pytest.mark.parametrize(("population", "size", "z"), CASES)
def test_one_step_has_the_published_profile(population, size, z):
    """δ(ε) = p·δ_G(log(1 + (e^ε − 1)/p))  [Balle 2018, Thm 9]."""
    p = size / population
    exact = [p * gaussian_delta(math.log1p(math.expm1(e) / p), 1 / z) for e in EPSILONS]
    claimed = claimed_delta(population, size, z)
    np.testing.assert_allclose(claimed, exact, rtol=1e-3, atol=1e-9)
    assert np.all(claimed >= np.array(exact) - 1e-12)


@pytest.mark.parametrize(("population", "size", "z"), CASES)
def test_no_small_population_beats_it(population, size, z):
    """Contributions of norm at most ½, so a replacement moves the sum by at most 1."""
    draws = np.random.default_rng(0)
    bound = claimed_delta(population, size, z)
    others = [np.full(population - 1, c) for c in (-0.5, 0.0, 0.5)]
    others += [np.resize([0.5, -0.5], population - 1)]
    others += list(draws.uniform(-0.5, 0.5, (5, population - 1)))
    for rest in others:
        for one, another in ((0.5, -0.5), (0.5, 0.0), tuple(draws.uniform(-0.5, 0.5, 2))):
            before = outputs([*rest, one], size)
            after = outputs([*rest, another], size)
            for p, q in ((before, after), (after, before)):
                assert np.all(delta_between(p, q, z, EPSILONS) <= bound + 1e-7)


def test_spread_out_others_come_close_to_it():
    """When the others' sums tell who was drawn instead, the bound is nearly attained."""
    z, p = 0.5, 0.5
    before = delta_between([(p, 0.5), (1 - p, 0.0)], [(p, -0.5), (1 - p, 0.0)], z, EPSILONS)
    assert before[0] > 0.6 * claimed_delta(2, 1, z)[0]


def test_the_enumeration_would_notice_poisson_s_pair():
    """The planted mistake: taking the Poisson replace-one pair, whose base is common to both.

    Without replacement somebody else takes the free seat, so the base moves too.
    """
    z, q = 0.4, 0.5
    poisson = delta_between([(1 - q, 0), (q, 0.5)], [(1 - q, 0), (q, -0.5)], z, EPSILONS)
    before, after = outputs([-0.5, 0.5], 1), outputs([-0.5, -0.5], 1)
    assert np.any(delta_between(before, after, z, EPSILONS) > poisson + 1e-3)
