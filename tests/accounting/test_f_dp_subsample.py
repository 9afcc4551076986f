"""C_p(f): against its definition on a grid, against integrals, against the accountant's events."""

import math

import numpy as np
import pytest
from hockey_stick import delta_between
from scipy.stats import norm
from tiny_run import REPLACE

from tacit import trade_off
from tacit.accounting import Plan, TradeOff, gaussian_trade_off, subsample
from tacit.accounting.pld import privacy_loss
from tacit.sampling import MiniSets, WithoutReplacement
from tacit.sampling.scheme import Unit

ALPHAS = np.unique(
    np.concatenate([np.linspace(0, 1, 10_001), norm.cdf(np.linspace(-12, 8, 10_001))])
)
CASES = [(0.5, 0.3), (1.25, 0.05), (3.0, 0.5), (8.0, 0.1), (2.0, 1.0)]
BOTH = pytest.mark.parametrize(("mu", "p"), CASES)


def convex_hull(x, y):
    """The lower convex envelope of points, at x."""
    kept = []
    for k in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[k] - x[a]) < (y[k] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(k)
    return np.interp(x, x[kept], y[kept])


def by_definition(f, p, alphas=ALPHAS):
    """min{f_p, f_p⁻¹}** on a grid, f_p = p·f + (1 − p)·(1 − α); at grid points from above."""
    f_p = p * f(alphas) + (1 - p) * (1 - alphas)
    inverse = np.interp(alphas, f_p[::-1], alphas[::-1], right=0.0)
    return f_p, convex_hull(alphas, np.minimum(f_p, inverse))


@BOTH
def test_it_is_what_the_definition_says_and_not_above(mu, p):
    _, exact = by_definition(lambda a: norm.sf(norm.ppf(a) + mu), p)
    found = subsample(gaussian_trade_off(mu), p)(ALPHAS)
    assert np.all(found <= exact + 1e-12)
    assert np.max(exact - found) < 3e-5


@pytest.mark.parametrize(("at", "delta"), [(1.0, 0.0), (0.5, 0.1), (3.0, 0.01)])
@pytest.mark.parametrize("p", [0.1, 0.6])
def test_it_is_for_any_curve(at, delta, p):
    curve = TradeOff([at], [delta])
    _, exact = by_definition(curve, p)
    found = subsample(curve, p)(ALPHAS)
    assert np.all(found <= exact + 1e-12)
    assert np.max(exact - found) < 1e-4


@pytest.mark.parametrize(("mu", "p"), CASES[:4])
def test_leaving_out_the_mirror_image_would_be_seen(mu, p):
    """The planted mistake: f_p alone, which holds in one direction only."""
    f_p, exact = by_definition(lambda a: norm.sf(norm.ppf(a) + mu), p)
    assert np.any(f_p > exact + 1e-4)


@BOTH
def test_its_profile_is_the_integral_of_the_mixture(mu, p):
    """max over both directions of (1 − p)·N(0) + p·N(1) against N(0), which is p·δ_G(…)."""
    z = 1 / mu
    epsilons = np.linspace(0, 2, 9)
    mixture, base = [(1 - p, 0.0), (p, 1.0)], [(1.0, 0.0)]
    exact = delta_between(mixture, base, z, epsilons)
    assert np.all(exact >= delta_between(base, mixture, z, epsilons) - 1e-9)
    found = subsample(gaussian_trade_off(mu), p).delta(epsilons)
    assert np.all(found >= exact - 1e-6)
    np.testing.assert_allclose(found, exact, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("scheme", "unit"),
    [(WithoutReplacement(40, 2), Unit.RECORD), (MiniSets(20, 64, chosen=1), Unit.MINI_SET)],
)
@pytest.mark.parametrize("z", [0.4, 0.8, 3.0])
def test_one_sampled_step_is_the_event_s_distribution_in_both_directions(scheme, unit, z):
    """C_{m/N}(G_{1/z}) = the accounted SampledWithoutReplacement(Gaussian), replace-one, T = 1."""
    ours = subsample(gaussian_trade_off(1 / z), 0.05)
    run = trade_off(z, scheme, 1, relation=REPLACE, unit=unit)
    np.testing.assert_allclose(ours(ALPHAS), run(ALPHAS), atol=5e-6)
    loss = privacy_loss(Plan(scheme, z, REPLACE, 1, unit).event(1), REPLACE)
    epsilons = np.linspace(0, 2 / z, 21)
    for direction in (loss._pmf_remove, loss._pmf_add):
        theirs = np.array(direction.get_delta_for_epsilon(epsilons))
        np.testing.assert_allclose(ours.delta(epsilons), theirs, rtol=1e-3, atol=1e-8)


def test_extremes():
    curve = gaussian_trade_off(2.0)
    np.testing.assert_allclose(subsample(curve, 1.0)(ALPHAS), curve(ALPHAS), atol=1e-14)
    told = subsample(TradeOff([0.0], [1.0]), 0.25)
    assert told.advantage == 0.25
    loud = subsample(gaussian_trade_off(200.0), 0.01)
    assert np.all(np.isfinite(loud(ALPHAS)))
    assert loud.advantage == pytest.approx(0.01)
    assert math.isfinite(loud.epsilon(1e-5))
    for p in (0.0, 1.5):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            subsample(curve, p)
