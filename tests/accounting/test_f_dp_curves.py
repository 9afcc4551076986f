"""A curve from points of a profile: its duals, and that it never says more than is true."""

import math

import numpy as np
import pytest
from hockey_stick import delta_between, gaussian_delta, gaussian_epsilon
from scipy.stats import norm
from tiny_run import ADD, REPLACE
from two_point import response, type_two

from tacit import epsilon, trade_off
from tacit.accounting import Plan, TradeOff, gaussian_trade_off
from tacit.accounting.pld import privacy_loss, profile_of
from tacit.sampling import MiniSets, Poisson, WithoutReplacement
from tacit.sampling.scheme import Unit

ALPHAS = np.concatenate([np.linspace(0, 1, 2001), norm.cdf(np.linspace(-7, 7, 2001))])
MUS = pytest.mark.parametrize("mu", [0.01, 0.5, 1.0, 3.0, 8.0, 40.0])


def g(mu, alphas=ALPHAS):
    return norm.sf(norm.ppf(alphas) + mu)


def above(curve, truth, alphas=ALPHAS):
    """By how much a curve claims more than the truth, at its worst."""
    return float(np.max(curve(alphas) - truth))


@MUS
def test_the_gaussian_curve_is_never_above_g_mu_and_close_to_it(mu):
    curve = gaussian_trade_off(mu)
    assert above(curve, g(mu)) <= 1e-15
    assert np.max(g(mu) - curve(ALPHAS)) < 1e-5


@pytest.mark.parametrize("mu", [0.5, 3.0])
def test_a_profile_that_is_rounded_down_would_be_seen(mu):
    """The planted mistake: δ of the losses a grid step lower, or a part in a thousand smaller."""
    curve = gaussian_trade_off(mu)
    keeps = len(curve.deltas) // 2
    shifted = TradeOff(curve.epsilons[:keeps], curve.deltas[1 : keeps + 1])
    smaller = TradeOff(curve.epsilons, curve.deltas * 0.999)
    assert above(shifted, g(mu)) > 1e-6
    assert above(smaller, g(mu)) > 1e-6


@MUS
def test_the_duals_of_the_gaussian_curve(mu):
    """δ(ε) and ε(δ) of [Balle 2018], the advantage 2Φ(μ/2) − 1, and μ itself."""
    curve = gaussian_trade_off(mu)
    for at in (0.0, 0.3 * mu, 2 * mu):
        exact = gaussian_delta(at, mu)
        assert exact - 1e-15 <= float(curve.delta(at)[0]) <= exact * 1.0005 + 1e-14
    for delta in (1e-9, 1e-5, 0.01):
        exact = gaussian_epsilon(delta, mu)
        assert exact * (1 - 1e-9) <= curve.epsilon(delta) <= exact * 1.0005 + 1e-6
    assert curve.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1, abs=1e-10)


@pytest.mark.parametrize("mu", [0.01, 0.5, 1.0, 3.0, 8.0])
def test_the_best_gaussian_bound_of_a_gaussian_curve_is_itself(mu):
    assert mu - 1e-12 <= gaussian_trade_off(mu).gaussian_mu() <= mu + 3e-4


def test_the_best_gaussian_bound_is_a_bound_and_the_next_is_not():
    curve = trade_off(0.7, Poisson(0.05), 60)
    mu = curve.gaussian_mu(smallest_error=1e-4)
    alphas = ALPHAS[(ALPHAS >= 1e-4) & (curve(ALPHAS) >= 1e-4)]
    assert np.all(g(mu, alphas) <= curve(alphas) + 1e-12)
    assert np.any(g(mu - 0.002, alphas) > curve(alphas))


def test_the_gaussian_bound_is_infinite_where_there_is_none():
    assert gaussian_trade_off(40.0).gaussian_mu() == math.inf
    assert TradeOff([0.0], [1.0]).gaussian_mu() == math.inf
    assert gaussian_trade_off(0.0).gaussian_mu() < 3e-4


@pytest.mark.parametrize(("at", "delta"), [(0.5, 0.0), (1.0, 0.05), (3.0, 1e-3), (0.0, 0.2)])
def test_one_point_is_randomised_response(at, delta):
    curve = TradeOff([at], [delta])
    np.testing.assert_allclose(curve(ALPHAS), type_two(response(at, delta), ALPHAS), atol=1e-14)
    p, q = response(at, delta)
    for e in (0.0, at / 2, at, at + 1):
        exact = np.maximum(p - math.exp(e) * q, 0).sum()
        assert float(curve.delta(e)[0]) == pytest.approx(exact, abs=1e-14)
    assert curve.advantage == pytest.approx(np.abs(p - q).sum() / 2)


def test_the_advantage_is_the_largest_gap_of_the_curve():
    curve = trade_off(1.0, WithoutReplacement(50, 5), 20, relation=REPLACE)
    assert curve.advantage == pytest.approx(np.max(1 - ALPHAS - curve(ALPHAS)), abs=1e-6)


@pytest.mark.parametrize(
    ("p", "q", "std", "run"),
    [
        ([(0.9, 0), (0.1, 1)], [(1, 0)], 0.8, (0.8, Poisson(0.1), 1, ADD)),
        ([(0.7, 0), (0.3, 0.5)], [(0.7, 0), (0.3, -0.5)], 0.6, (0.6, Poisson(0.3), 1, REPLACE)),
    ],
)
def test_one_step_is_never_above_its_integrals(p, q, std, run):
    """Against both directions by quadrature: no δ of the curve is below theirs."""
    z, scheme, steps, relation = run
    curve = trade_off(z, scheme, steps, relation=relation)
    epsilons = np.linspace(0, 3, 13)
    exact = np.maximum(delta_between(p, q, std, epsilons), delta_between(q, p, std, epsilons))
    found = curve.delta(epsilons)
    assert np.all(found >= exact - 1e-8)  # the quadrature's own error
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-7)


RUNS = {
    "poisson": (1.0, Poisson(0.2), 8, ADD, Unit.RECORD),
    "sets": (1.0, MiniSets(10, 8, chosen=1), 8, ADD, Unit.MINI_SET),
    "revealed": (1.0, MiniSets(20, 5, chosen=2), 10, ADD, Unit.RECORD),
}


@pytest.mark.parametrize(("z", "scheme", "steps", "relation", "unit"), RUNS.values(), ids=RUNS)
def test_the_profile_is_that_of_the_distribution(z, scheme, steps, relation, unit):
    """Against dp-accounting's own δ(ε), and ε(δ) against the one that is reported."""
    under = REPLACE if unit is Unit.MINI_SET else relation
    loss = privacy_loss(Plan(scheme, z, relation, steps, unit).event(steps), under)
    epsilons, deltas = profile_of(loss, count=50)
    theirs = np.array(loss.get_delta_for_epsilon(epsilons))
    np.testing.assert_allclose(deltas, theirs, rtol=1e-6, atol=1e-13)
    assert np.all(deltas >= theirs - 1e-13)
    curve = trade_off(z, scheme, steps, relation=relation, unit=unit)
    reported = epsilon(z, scheme, steps, delta=1e-5, relation=relation, unit=unit)
    assert curve.epsilon(1e-5) == pytest.approx(reported, rel=1e-3)
    assert curve.epsilon(1e-5) >= reported * (1 - 1e-9)


def test_a_run_without_privacy_has_a_curve_and_no_nan():
    """e^ε is beyond a double: 62 blocks of σ = 0.01875."""
    curve = trade_off(
        0.01875 / math.sqrt(62), MiniSets(704, 64, chosen=1), 50, relation=REPLACE,
        unit=Unit.MINI_SET,
    )  # fmt: skip
    errors = curve(ALPHAS)
    assert np.all(np.isfinite(errors))
    # 50 draws of one in 704 sets: whoever is drawn is seen, and nobody else.
    drawn = 1 - (1 - 1 / 704) ** 50
    assert curve.advantage == pytest.approx(drawn, rel=1e-6)
    assert 1e4 < curve.epsilon(1e-5) < 1e7


def test_points_are_checked():
    with pytest.raises(ValueError, match="one delta per epsilon"):
        TradeOff([0.0, 1.0], [0.1])
    with pytest.raises(ValueError, match="ascending"):
        TradeOff([1.0, 0.5], [0.1, 0.2])
    with pytest.raises(ValueError, match="probability"):
        TradeOff([0.0], [1.5])
    with pytest.raises(ValueError, match="0 or more"):
        gaussian_trade_off(-1.0)
    with pytest.raises(ValueError, match="strictly between"):
        gaussian_trade_off(1.0).epsilon(0.0)
    with pytest.raises(ValueError, match="0 or more"):
        gaussian_trade_off(1.0).delta(-0.5)
    with pytest.raises(ValueError, match="smallest error"):
        gaussian_trade_off(1.0).gaussian_mu(0.7)


def test_a_point_that_adds_nothing_takes_nothing_away():
    """A dominated (ε, δ) between two others, and one that is beaten by a smaller ε."""
    plain = TradeOff([0.2, 1.0], [0.3, 0.0])
    np.testing.assert_allclose(TradeOff([0.2, 0.5, 1.0], [0.3, 0.29, 0.0])(ALPHAS), plain(ALPHAS))
    np.testing.assert_allclose(TradeOff([0.2, 0.5, 1.0], [0.3, 0.9, 0.0])(ALPHAS), plain(ALPHAS))
