"""Two and three steps, composed by brute force and by us."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from hockey_stick import log_density
from tiny_run import ADD, REPLACE

from tacit.accounting.pld import privacy_loss
from tacit.sampling import RevealedSampleDpEvent

EPSILONS = np.array([0.0, 0.3, 1.0, 2.0])
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


def claimed_delta(event, relation, count):
    composed = dpa.SelfComposedDpEvent(event, count)
    return np.array(privacy_loss(composed, relation).get_delta_for_epsilon(EPSILONS))


def masses(p, q, points):
    """Both distributions on small intervals, where either has any mass."""
    means = sorted({mean for mixture in (p, q) for _, mean in mixture})
    x = np.concatenate([np.linspace(m - 6 * Z, m + 6 * Z, points) for m in means])
    x = np.unique(np.round(x, 9))
    widths = np.gradient(x)
    inside = widths < 12 * Z / (points - 1) * 1.5
    return tuple((np.exp(log_density(x, m, Z)) * widths)[inside] for m in (p, q))


def delta_of(p, q, epsilons=EPSILONS):
    return np.array([np.maximum(p - math.exp(e) * q, 0).sum() for e in epsilons])


def product(masses_p, masses_q, first_p, first_q):
    return np.outer(first_p, masses_p).ravel(), np.outer(first_q, masses_q).ravel()


def worse_direction(p, q, times, points):
    found = []
    for first, second in ((p, q), (q, p)):
        one = masses(first, second, points)
        total = one
        for _ in range(times - 1):
            total = product(*one, *total)
        found.append(delta_of(*total))
    return np.maximum(*found)


@ALL_PAIRS
def test_two_steps_by_quadrature_in_the_plane(event, relation, p, q):
    brute = worse_direction(p, q, times=2, points=700)
    np.testing.assert_allclose(claimed_delta(event, relation, 2), brute, rtol=5e-3, atol=1e-5)


@ALL_PAIRS
def test_three_steps_by_quadrature_in_space(event, relation, p, q):
    brute = worse_direction(p, q, times=3, points=80)
    np.testing.assert_allclose(claimed_delta(event, relation, 3), brute, rtol=2e-2, atol=2e-4)


@pytest.mark.parametrize("count", [3, 40])
def test_many_steps_by_monte_carlo(count):
    """δ = E_P[max(1 − e^(ε − L), 0)], L the sum of the steps' losses."""
    event, relation, p, q = PAIRS["poisson, add"]
    draws, size = np.random.default_rng(0), 200_000
    loss = np.zeros(size)
    for _ in range(count):
        x = Z * draws.normal(size=size) + (draws.random(size) < Q)
        loss += log_density(x, p, Z) - log_density(x, q, Z)
    for epsilon, claimed in zip(EPSILONS, claimed_delta(event, relation, count), strict=True):
        terms = np.maximum(-np.expm1(epsilon - loss), 0)
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
    np.testing.assert_allclose(claimed_delta(event, REPLACE, 2), brute, rtol=5e-3, atol=1e-6)
