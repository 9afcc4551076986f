"""Tensor products of curves: against closed forms, against brute force, never too good."""

import importlib
import math

import numpy as np
import pytest
from scipy.stats import norm
from tiny_run import ADD, REPLACE
from two_point import product, response, type_two

from tacit import trade_off
from tacit.accounting import (
    TradeOff,
    gaussian_trade_off,
    layerwise_multiplier,
    subsample,
    tensor_power,
    tensor_product,
)
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
    honest = module.symmetric_pmf

    def lower(deltas, interval):
        return honest(np.append(deltas[1:], deltas[-1]), interval)

    monkeypatch.setattr(module, "symmetric_pmf", lower)
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
