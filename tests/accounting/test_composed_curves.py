"""Products of curves and sampled curves: against closed forms, brute force and events."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
from brute_force import delta_between, deltas_of_losses, product, response, type_two
from scipy.stats import norm
from tiny_run import ADD, REPLACE

from tacit import trade_off
from tacit.accounting import (
    Plan,
    TradeOff,
    gaussian_trade_off,
    layerwise_multiplier,
    subsample,
    tensor_power,
    tensor_product,
)
from tacit.accounting.pld import privacy_loss
from tacit.sampling import MiniSets, Poisson, WithoutReplacement
from tacit.sampling.scheme import Unit

ALPHAS = np.concatenate([np.linspace(0, 1, 1001), norm.cdf(np.linspace(-6, 6, 501))])
PAIRS = [
    [(1.0, 0.0), (0.5, 0.0)],
    [(1.0, 0.01), (0.3, 0.1), (2.0, 0.0)],
    [(0.7, 0.0)] * 6,
    [(4.0, 1e-3), (0.0, 0.05)],
]


def g(mu):
    return norm.sf(norm.ppf(ALPHAS) + mu)


def outline(curve):
    """The same curve without its events, so that a product must convolve its lines."""
    return TradeOff(curve.epsilons, curve.deltas)


@pytest.mark.parametrize("made", [lambda c: c, outline], ids=["events", "lines"])
@pytest.mark.parametrize("mus", [(0.6, 0.8), (0.1, 2.0), (1.0, 1.0, 1.0), (5.0, 0.2)])
def test_gaussians_make_the_root_of_the_sum_of_squares(mus, made):
    """G_a ⊗ G_b = G_√(a² + b²)  [Dong 2022, Cor. 3.3]."""
    found = tensor_product(*(made(gaussian_trade_off(mu)) for mu in mus))(ALPHAS)
    exact = g(math.hypot(*mus))
    assert np.all(found <= exact + 1e-14)
    assert np.max(exact - found) < 2e-5


@pytest.mark.parametrize("points", PAIRS)
def test_two_point_mechanisms_against_every_outcome(points):
    found = tensor_product(*(TradeOff([e], [d]) for e, d in points))(ALPHAS)
    exact = type_two(product(*(response(e, d) for e, d in points)), ALPHAS)
    assert np.all(found <= exact + 1e-13)
    assert np.max(exact - found) < 3e-3


@pytest.mark.parametrize("points", PAIRS[:3])
def test_a_product_that_forgets_a_factor_would_be_seen(points):
    """The planted mistake, and another: losses that are rounded down to the grid."""
    exact = type_two(product(*(response(e, d) for e, d in points)), ALPHAS)
    fewer = tensor_product(*(TradeOff([e], [d]) for e, d in points[1:]))(ALPHAS)
    assert np.any(fewer > exact + 1e-3)
    lower = [TradeOff([max(0.0, e - 0.01)], [d]) for e, d in points]
    assert np.any(tensor_product(*lower)(ALPHAS) > exact + 1e-4)


def test_a_grid_that_rounds_losses_down_would_be_seen(monkeypatch):
    """The planted mistake, inside: each loss gets the δ of the next grid point."""
    module = importlib.import_module("tacit.accounting.f_dp")
    honest = module.symmetric_loss

    def lower(profile, largest, interval):
        return honest(lambda epsilons: profile(epsilons + interval), largest, interval)

    monkeypatch.setattr(module, "symmetric_loss", lower)
    exact = type_two(product(*[response(0.7)] * 6), ALPHAS)
    assert np.any(tensor_power(TradeOff([0.7], [0.0]), 6)(ALPHAS) > exact + 1e-4)


def test_the_lines_of_a_sampled_step_compose_as_its_event_does():
    """C_p(G_{1/z})^{⊗T} from lines, T = 50, against the event's own distribution."""
    lines = tensor_power(subsample(gaussian_trade_off(1 / 0.8), 0.05), 50)
    event = trade_off(0.8, WithoutReplacement(100, 5), 50, relation=REPLACE)
    np.testing.assert_allclose(lines(ALPHAS), event(ALPHAS), atol=3e-6)
    assert lines.epsilon(1e-5) == pytest.approx(event.epsilon(1e-5), rel=1e-4)


def test_runs_compose_as_the_longer_run():
    parts = [trade_off(1.0, Poisson(0.1), steps) for steps in (5, 10, 15)]
    whole = trade_off(1.0, Poisson(0.1), 30)(ALPHAS)
    np.testing.assert_allclose(tensor_product(*parts)(ALPHAS), whole, atol=1e-9)
    np.testing.assert_allclose(
        tensor_product(tensor_product(parts[0], parts[1]), parts[2])(ALPHAS), whole, atol=1e-9
    )
    np.testing.assert_allclose(tensor_power(parts[0], 6)(ALPHAS), whole, atol=1e-9)


def test_different_runs_under_one_relation():
    """A run on sets is accounted as replacing; beside Poisson it is for add-or-remove."""
    sets = trade_off(1.5, MiniSets(20, 4, chosen=1), 20, relation=ADD, unit=Unit.MINI_SET)
    poisson = trade_off(1.5, Poisson(0.1), 20, relation=ADD)
    both = tensor_product(sets, poisson)
    by_lines = tensor_product(outline(sets), outline(poisson))
    assert both.relation is ADD
    assert np.all(both(ALPHAS) <= np.minimum(sets(ALPHAS), poisson(ALPHAS)) + 1e-12)
    assert np.all(by_lines(ALPHAS) <= both(ALPHAS) + 1e-5)
    np.testing.assert_allclose(by_lines(ALPHAS), both(ALPHAS), atol=5e-3)


def test_curves_for_different_neighbours_do_not_compose():
    one = trade_off(1.0, Poisson(0.1), 1, relation=ADD)
    other = trade_off(1.0, Poisson(0.1), 1, relation=REPLACE)
    with pytest.raises(ValueError, match="one relation"):
        tensor_product(one, other)


def test_nothing_and_everything():
    np.testing.assert_array_equal(tensor_product()(ALPHAS), 1 - ALPHAS)
    curve = gaussian_trade_off(1.0)
    np.testing.assert_array_equal(tensor_power(curve, 0)(ALPHAS), 1 - ALPHAS)
    nothing = tensor_product(outline(curve), gaussian_trade_off(0.0))
    np.testing.assert_allclose(nothing(ALPHAS), curve(ALPHAS), atol=1e-5)
    told = tensor_product(outline(curve), trade_off(0.0, Poisson(0.5), 1))
    np.testing.assert_array_equal(told(ALPHAS), 0 * ALPHAS)
    with pytest.raises(ValueError, match="0 or more"):
        tensor_power(curve, -1)


@pytest.mark.parametrize("shares", [4, (1.0, 1.0, 1.0, 1.0), (0.5, 1.0, 2.0), (3.0,)])
def test_blocks_make_one_gaussian(shares):
    """σ/√L, and σ/√(Σ p_h²) for blocks of noise σ/p_h: against the product of their curves."""
    sigma = 2.5
    each = [1.0] * shares if isinstance(shares, int) else shares
    blocks = [outline(gaussian_trade_off(p / sigma)) for p in each]
    joint = gaussian_trade_off(1 / layerwise_multiplier(sigma, shares))(ALPHAS)
    found = tensor_product(*blocks)(ALPHAS)
    np.testing.assert_allclose(found, joint, atol=2e-5)


def test_sampling_each_block_on_its_own_would_claim_too_much():
    """The planted mistake: C_p(G)^{⊗L} for C_p(G^{⊗L}), though there is one sample."""
    sigma, blocks, p = 1.5, 8, 0.05
    right = subsample(gaussian_trade_off(1 / layerwise_multiplier(sigma, blocks)), p)
    wrong = tensor_power(subsample(gaussian_trade_off(1 / sigma), p), blocks)
    assert np.any(wrong(ALPHAS) > right(ALPHAS) + 1e-2)


@pytest.mark.parametrize("shares", [0, (), (1.0, -1.0), (math.inf,)])
def test_shares_are_checked(shares):
    with pytest.raises(ValueError, match="give"):
        layerwise_multiplier(1.0, shares)


# C_p(f): against its definition on a grid, integrals, and the accountant's events.


FINE_ALPHAS = np.unique(
    np.concatenate([np.linspace(0, 1, 10_001), norm.cdf(np.linspace(-12, 8, 10_001))])
)
CASES = [(0.5, 0.3), (1.25, 0.05), (3.0, 0.5), (8.0, 0.1), (2.0, 1.0)]
SAMPLED = pytest.mark.parametrize(("mu", "p"), CASES)


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


def by_definition(f, p, alphas=FINE_ALPHAS):
    """min{f_p, f_p⁻¹}** on a grid, f_p = p·f + (1 − p)·(1 − α); at grid points from above."""
    f_p = p * f(alphas) + (1 - p) * (1 - alphas)
    inverse = np.interp(alphas, f_p[::-1], alphas[::-1], right=0.0)
    return f_p, convex_hull(alphas, np.minimum(f_p, inverse))


@SAMPLED
def test_it_is_what_the_definition_says_and_not_above(mu, p):
    _, exact = by_definition(lambda a: norm.sf(norm.ppf(a) + mu), p)
    found = subsample(gaussian_trade_off(mu), p)(FINE_ALPHAS)
    assert np.all(found <= exact + 1e-12)
    assert np.max(exact - found) < 3e-5


@pytest.mark.parametrize(("at", "delta"), [(1.0, 0.0), (0.5, 0.1), (3.0, 0.01)])
@pytest.mark.parametrize("p", [0.1, 0.6])
def test_it_is_for_any_curve(at, delta, p):
    curve = TradeOff([at], [delta])
    _, exact = by_definition(curve, p)
    found = subsample(curve, p)(FINE_ALPHAS)
    assert np.all(found <= exact + 1e-12)
    assert np.max(exact - found) < 1e-4


@pytest.mark.parametrize(("mu", "p"), CASES[:4])
def test_leaving_out_the_mirror_image_would_be_seen(mu, p):
    """The planted mistake: f_p alone, which holds in one direction only."""
    f_p, exact = by_definition(lambda a: norm.sf(norm.ppf(a) + mu), p)
    assert np.any(f_p > exact + 1e-4)


@SAMPLED
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
    np.testing.assert_allclose(ours(FINE_ALPHAS), run(FINE_ALPHAS), atol=5e-6)
    loss = privacy_loss(Plan(scheme, z, REPLACE, 1, unit).event(1), REPLACE)
    epsilons = np.linspace(0, 2 / z, 21)
    for direction in loss:
        theirs = deltas_of_losses(direction, epsilons)
        np.testing.assert_allclose(ours.delta(epsilons), theirs, rtol=1e-3, atol=1e-8)


def test_extremes():
    curve = gaussian_trade_off(2.0)
    np.testing.assert_allclose(subsample(curve, 1.0)(FINE_ALPHAS), curve(FINE_ALPHAS), atol=1e-14)
    told = subsample(TradeOff([0.0], [1.0]), 0.25)
    assert told.advantage == 0.25
    loud = subsample(gaussian_trade_off(200.0), 0.01)
    assert np.all(np.isfinite(loud(FINE_ALPHAS)))
    assert loud.advantage == pytest.approx(0.01)
    assert math.isfinite(loud.epsilon(1e-5))
    for p in (0.0, 1.5):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            subsample(curve, p)
