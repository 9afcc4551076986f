"""Each event's privacy loss bounds real mechanisms: by quadrature, enumeration and Monte Carlo."""

from __future__ import annotations

import math
from itertools import combinations

import dp_accounting as dpa
import numpy as np
import pytest
from brute_force import delta_between, deltas_of_losses, gaussian_delta, log_density
from tiny_run import ADD, REPLACE

from tacit import epsilon
from tacit.accounting.pld import privacy_loss
from tacit.sampling import MiniSets, Poisson, RevealedSampleDpEvent
from tacit.sampling.scheme import Unit

EPSILONS = np.array([0.0, 0.05, 0.3, 0.5, 1.0, 2.0, 2.5, 4.0])


def delta_of(event, relation, count=1):
    composed = dpa.SelfComposedDpEvent(event, count)
    return np.max([deltas_of_losses(way, EPSILONS) for way in privacy_loss(composed, relation)], 0)


# Poisson sampling under replace-one: the pair (1−q)N(0) + qN(±½).


POISSON_CASES = [(0.5, 0.1), (1.0, 0.01), (1.0, 0.5), (0.3, 0.9), (3.0, 0.2)]


def poisson_delta(z, q):
    return delta_of(dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z)), REPLACE)


def exact_delta(z, q):
    """z is the noise over the sensitivity, which is the distance from −½ to ½."""
    return delta_between([(1 - q, 0), (q, 0.5)], [(1 - q, 0), (q, -0.5)], z, EPSILONS)


@pytest.mark.parametrize(("z", "q"), POISSON_CASES)
def test_one_step_has_the_profile_of_the_pair(z, q):
    claimed, exact = poisson_delta(z, q), exact_delta(z, q)
    np.testing.assert_allclose(claimed, exact, rtol=1e-3, atol=1e-9)
    assert np.all(claimed >= exact - 1e-7)


@pytest.mark.parametrize(("z", "q"), POISSON_CASES)
def test_no_two_scalars_beat_it(z, q):
    draws = np.random.default_rng(0)
    bound = poisson_delta(z, q)
    pairs = [(0.5, -0.5), (0.5, 0.0), (0.0, -0.5), (0.5, 0.5), *draws.uniform(-0.5, 0.5, (20, 2))]
    for g, h in pairs:
        for first, second in ((g, h), (h, g)):
            found = delta_between([(1 - q, 0), (q, first)], [(1 - q, 0), (q, second)], z, EPSILONS)
            assert np.all(found <= bound + 1e-7)


def in_two_dimensions(z, q, g, h, points=901):
    """The same divergence for vectors in the plane, on a grid of squares."""
    side = np.linspace(-0.5 - 9 * z, 0.5 + 9 * z, points)
    x, y = np.meshgrid(side, side)

    def density(mean):
        return np.exp(-((x - mean[0]) ** 2 + (y - mean[1]) ** 2) / (2 * z * z))

    cell = (side[1] - side[0]) ** 2 / (2 * math.pi * z * z)
    base = (1 - q) * density((0, 0))
    p, r = base + q * density(g), base + q * density(h)
    return np.array([np.maximum(p - math.exp(e) * r, 0).sum() * cell for e in EPSILONS])


@pytest.mark.parametrize(("z", "q"), POISSON_CASES[:4])
def test_no_two_vectors_in_the_plane_beat_it(z, q):
    draws = np.random.default_rng(1)
    bound = poisson_delta(z, q)
    for _ in range(8):
        angles, radii = draws.uniform(0, 2 * math.pi, 2), 0.5 * draws.uniform(0.6, 1, 2)
        g, h = ((r * math.cos(a), r * math.sin(a)) for a, r in zip(angles, radii, strict=True))
        found = in_two_dimensions(z, q, g, h)
        assert np.all(found <= bound + 1e-5)
    opposite = in_two_dimensions(z, q, (0.3, 0.4), (-0.3, -0.4))
    np.testing.assert_allclose(opposite, bound, rtol=2e-2, atol=1e-5)  # and this one attains it


def test_no_two_vectors_in_space_beat_it():
    """Monte Carlo: δ = E_P[max(1 − e^ε Q/P, 0)]."""
    draws = np.random.default_rng(2)
    z, q, count = 0.5, 0.3, 400_000
    bound = poisson_delta(z, q)
    for _ in range(8):
        g, h = (v / np.linalg.norm(v) / 2 for v in draws.normal(size=(2, 3)))
        x = z * draws.normal(size=(count, 3)) + (draws.random(count) < q)[:, None] * g

        def log_density(mean, x=x):
            near = -((x - mean) ** 2).sum(axis=1) / (2 * z * z)
            return np.logaddexp(math.log(q) + near, math.log1p(-q) - (x**2).sum(1) / (2 * z * z))

        loss = log_density(g) - log_density(h)
        for e, most in zip(EPSILONS, bound, strict=True):
            terms = np.maximum(-np.expm1(e - loss), 0)
            assert terms.mean() <= most + 4 * terms.std() / math.sqrt(count) + 1e-9


def test_the_quadrature_would_notice_half_the_distance():
    """The planted mistake: the pair at ±¼, as if the sensitivity were halved once too often."""
    z, q = 1.0, 0.5
    wrong = delta_between([(1 - q, 0), (q, 0.25)], [(1 - q, 0), (q, -0.25)], z, EPSILONS)
    assert np.any(wrong < exact_delta(z, q) - 1e-3)


def test_it_costs_less_than_the_add_or_remove_pair_at_the_same_multiplier():
    """Both pairs are a distance 1 apart, but here the noise without the record is in between."""
    for z, q in POISSON_CASES:
        replaced = epsilon(z, Poisson(q), 50, delta=1e-5, relation=REPLACE)
        assert replaced <= epsilon(z, Poisson(q), 50, delta=1e-5) * (1 + 1e-4)


# Fixed-size batches: C_p(G) against every mixture that a small population can make.


FIXED_SIZE_CASES = [(4, 2, 1.0), (4, 1, 0.5), (5, 3, 0.7), (6, 2, 0.4)]


def fixed_size_delta(population, size, z):
    gaussian = dpa.GaussianDpEvent(z)
    return delta_of(dpa.SampledWithoutReplacementDpEvent(population, size, gaussian), REPLACE)


def outputs(contributions, size):
    """All equally likely sums: the mixture that the mechanism really is."""
    sums = [sum(chosen) for chosen in combinations(contributions, size)]
    return [(1 / len(sums), total) for total in sums]


@pytest.mark.parametrize(("population", "size", "z"), FIXED_SIZE_CASES)
def test_one_step_has_the_published_profile(population, size, z):
    """δ(ε) = p·δ_G(log(1 + (e^ε − 1)/p))  [Balle 2018, Thm 9]."""
    p = size / population
    exact = [p * gaussian_delta(math.log1p(math.expm1(e) / p), 1 / z) for e in EPSILONS]
    claimed = fixed_size_delta(population, size, z)
    np.testing.assert_allclose(claimed, exact, rtol=1e-3, atol=1e-9)
    assert np.all(claimed >= np.array(exact) - 1e-12)


@pytest.mark.parametrize(("population", "size", "z"), FIXED_SIZE_CASES)
def test_no_small_population_beats_it(population, size, z):
    """Contributions of norm at most ½, so a replacement moves the sum by at most 1."""
    draws = np.random.default_rng(0)
    bound = fixed_size_delta(population, size, z)
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
    assert before[0] > 0.6 * fixed_size_delta(2, 1, z)[0]


def test_the_enumeration_would_notice_poisson_s_pair():
    """The planted mistake: taking the Poisson replace-one pair, whose base is common to both.

    Without replacement somebody else takes the free seat, so the base moves too.
    """
    z, q = 0.4, 0.5
    poisson = delta_between([(1 - q, 0), (q, 0.5)], [(1 - q, 0), (q, -0.5)], z, EPSILONS)
    before, after = outputs([-0.5, 0.5], 1), outputs([-0.5, -0.5], 1)
    assert np.any(delta_between(before, after, z, EPSILONS) > poisson + 1e-3)


# Mini-sets with a bound per record: the others in the set may give the draw away.


REVEALED_CASES = [(0.1, 0.5), (0.5, 1.0), (0.01, 0.3), (1.0, 1.0)]


@pytest.mark.parametrize(("p", "z"), REVEALED_CASES)
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
    assert np.all(worst[EPSILONS >= 1] > 2 * poisson[EPSILONS >= 1])
    assert np.all(worst <= revealed + 1e-7)
    np.testing.assert_allclose(worst, revealed, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("other", [-1.0, 0.0, 0.3, 1.0, 3.0, 30.0])
@pytest.mark.parametrize(("q", "z"), REVEALED_CASES)
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


# Two steps, three and many: composed by brute force and by us.


Z, Q = 0.8, 0.3
GAUSSIAN = dpa.GaussianDpEvent(Z)

# event, relation, and the pair of mixtures (weight, mean) that each step is
PAIRS = {
    "poisson, add": (
        dpa.PoissonSampledDpEvent(Q, GAUSSIAN),
        ADD,
        [(1 - Q, 0.0), (Q, 1.0)],
        [(1.0, 0.0)],
    ),
    "poisson, replace": (
        dpa.PoissonSampledDpEvent(Q, GAUSSIAN),
        REPLACE,
        [(1 - Q, 0.0), (Q, 0.5)],
        [(1 - Q, 0.0), (Q, -0.5)],
    ),
    # far enough away that the sample is revealed
    "revealed": (
        RevealedSampleDpEvent(Q, GAUSSIAN),
        REPLACE,
        [(1 - Q, 50.0), (Q, 1.0)],
        [(1 - Q, 50.0), (Q, 0.0)],
    ),
}
ALL_PAIRS = pytest.mark.parametrize(
    ("event", "relation", "p", "q"), PAIRS.values(), ids=list(PAIRS)
)


def masses(p, q, points):
    """Both distributions on small intervals, where either has any mass."""
    means = sorted({mean for mixture in (p, q) for _, mean in mixture})
    x = np.concatenate([np.linspace(m - 6 * Z, m + 6 * Z, points) for m in means])
    x = np.unique(np.round(x, 9))
    widths = np.gradient(x)
    inside = widths < 12 * Z / (points - 1) * 1.5
    return tuple((np.exp(log_density(x, m, Z)) * widths)[inside] for m in (p, q))


def delta_of_masses(p, q):
    return np.array([np.maximum(p - math.exp(e) * q, 0).sum() for e in EPSILONS])


def product(masses_p, masses_q, first_p, first_q):
    return np.outer(first_p, masses_p).ravel(), np.outer(first_q, masses_q).ravel()


def worse_direction(p, q, times, points):
    found = []
    for first, second in ((p, q), (q, p)):
        one = masses(first, second, points)
        total = one
        for _ in range(times - 1):
            total = product(*one, *total)
        found.append(delta_of_masses(*total))
    return np.maximum(*found)


@ALL_PAIRS
def test_two_steps_by_quadrature_in_the_plane(event, relation, p, q):
    brute = worse_direction(p, q, times=2, points=700)
    np.testing.assert_allclose(delta_of(event, relation, 2), brute, rtol=5e-3, atol=1e-5)


@ALL_PAIRS
def test_three_steps_by_quadrature_in_space(event, relation, p, q):
    brute = worse_direction(p, q, times=3, points=80)
    np.testing.assert_allclose(delta_of(event, relation, 3), brute, rtol=2e-2, atol=2e-4)


@pytest.mark.parametrize("count", [3, 40])
def test_many_steps_by_monte_carlo(count):
    """δ = E_P[max(1 − e^(ε − L), 0)], L the sum of the steps' losses."""
    event, relation, p, q = PAIRS["poisson, add"]
    draws, size = np.random.default_rng(0), 200_000
    loss = np.zeros(size)
    for _ in range(count):
        x = Z * draws.normal(size=size) + (draws.random(size) < Q)
        loss += log_density(x, p, Z) - log_density(x, q, Z)
    for e, claimed in zip(EPSILONS, delta_of(event, relation, count), strict=True):
        terms = np.maximum(-np.expm1(e - loss), 0)
        assert claimed == pytest.approx(terms.mean(), abs=5 * terms.std() / math.sqrt(size) + 1e-6)


def test_without_replacement_composes_as_its_trade_off_function_does():
    """Two steps of C_p(G): the pair with density ratio given by the slope of the profile."""
    population, size = 10, 3
    event = dpa.SampledWithoutReplacementDpEvent(population, size, GAUSSIAN)
    # C_p(f) = min(f_p, f_p⁻¹)**: on losses l > 0 it is Q' = pG(1) + (1−p)G(0) against G(0), both
    # mirrored at 0; the mass in between has loss 0.
    share = size / population
    x = np.linspace(-7, 9, 4001)
    dense = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    ratio = 1 - share + share * np.exp(x / Z - 0.5 / Z**2)
    above = ratio > 1
    losses = np.log(ratio[above])
    mass = (ratio * dense)[above]
    one_loss = np.concatenate([losses, -losses, [0.0]])
    one_mass = np.concatenate([mass, mass * np.exp(-losses), [0.0]])
    one_mass[-1] = 1 - one_mass.sum()
    loss = (one_loss[:, None] + one_loss[None, :]).ravel()
    both = np.outer(one_mass, one_mass).ravel()
    brute = [(both * np.maximum(-np.expm1(e - loss), 0)).sum() for e in EPSILONS]
    np.testing.assert_allclose(delta_of(event, REPLACE, 2), brute, rtol=5e-3, atol=1e-6)
