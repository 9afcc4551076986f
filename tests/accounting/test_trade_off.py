"""Trade-off curves: their shape, their duals, and that they never say more than is true."""

from __future__ import annotations

import math

import numpy as np
import pytest
from brute_force import (
    delta_between,
    deltas_of_losses,
    gaussian_delta,
    gaussian_epsilon,
    response,
    type_two,
)
from scipy.stats import norm
from tiny_run import ADD, REPLACE

from tacit import epsilon, trade_off
from tacit.accounting import Plan, TradeOff, gaussian_trade_off
from tacit.accounting.pld import privacy_loss, profile_of
from tacit.sampling import MiniSets, Poisson, ShuffledEpochs, WithoutReplacement
from tacit.sampling.scheme import Unit

EVEN_ALPHAS = np.linspace(0, 1, 801)  # for second differences
SHAPES = {
    "gaussian": (2.0, Poisson(1.0), 1, ADD),
    "poisson": (1.0, Poisson(0.02), 300, ADD),
    "poisson, replace": (1.0, Poisson(0.3), 10, REPLACE),
    "without replacement": (0.8, WithoutReplacement(100, 5), 50, REPLACE),
    "revealed": (1.0, MiniSets(20, 5, chosen=2), 10, ADD),
    "shuffled": (3.0, ShuffledEpochs(10), 35, REPLACE),
    "weak": (0.1, Poisson(0.5), 10, ADD),
    "strong": (100.0, Poisson(0.01), 10, ADD),
}
ALL_RUNS = pytest.mark.parametrize(
    ("z", "scheme", "steps", "relation"), SHAPES.values(), ids=list(SHAPES)
)


@ALL_RUNS
def test_it_is_a_symmetric_trade_off_function(z, scheme, steps, relation):
    f = trade_off(z, scheme, steps, relation=relation)(EVEN_ALPHAS)
    assert np.all(np.diff(f) <= 1e-9)
    assert np.all(np.diff(f, 2) >= -1e-9)
    assert f[0] <= 1
    assert np.all(f <= 1 - EVEN_ALPHAS + 1e-12)
    assert np.all(f >= 0)
    inverse = np.interp(EVEN_ALPHAS, f[::-1], EVEN_ALPHAS[::-1], left=1.0)
    inside = (f > 0.01) & (f < f[0] - 0.01)
    again = np.interp(f[inside], EVEN_ALPHAS, f)
    np.testing.assert_allclose(again, EVEN_ALPHAS[inside], atol=6e-3)
    assert inverse.shape == f.shape


@ALL_RUNS
def test_it_says_the_same_as_epsilon(z, scheme, steps, relation):
    """f(α) ≥ max(1 − δ − e^ε α, e^(−ε)(1 − δ − α)) for every (ε, δ)."""
    curve = trade_off(z, scheme, steps, relation=relation)(EVEN_ALPHAS)
    for delta in (1e-5, 1e-2, 0.2):
        at = epsilon(z, scheme, steps, delta=delta, relation=relation)
        line = 1 - delta - math.exp(at) * EVEN_ALPHAS
        mirrored = math.exp(-at) * (1 - delta - EVEN_ALPHAS)
        assert np.all(curve >= np.maximum(line, mirrored) - 1e-4)


def test_no_steps_tell_nothing_and_no_noise_tells_all():
    np.testing.assert_allclose(
        trade_off(1.0, Poisson(0.1), 0)(EVEN_ALPHAS), 1 - EVEN_ALPHAS, atol=1e-9
    )
    np.testing.assert_array_equal(trade_off(0.0, Poisson(0.1), 1)(EVEN_ALPHAS), 0 * EVEN_ALPHAS)


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_a_type_one_error_is_a_probability(alpha):
    with pytest.raises(ValueError, match="probability"):
        trade_off(1.0, Poisson(1.0), 1)(alpha)


# A curve from points of a profile.


ALPHAS = np.concatenate([np.linspace(0, 1, 2001), norm.cdf(np.linspace(-7, 7, 2001))])
MUS = pytest.mark.parametrize("mu", [0.01, 0.5, 1.0, 3.0, 8.0, 40.0])


def g(mu, alphas=ALPHAS):
    return norm.sf(norm.ppf(alphas) + mu)


def above(curve, truth):
    """By how much a curve claims more than the truth, at its worst."""
    return float(np.max(curve(ALPHAS) - truth))


@MUS
def test_the_gaussian_curve_is_never_above_g_mu_and_close_to_it(mu):
    for curve in (gaussian_trade_off(mu), trade_off(1 / mu, Poisson(1.0), 1)):
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


PROFILED = {
    "poisson": (1.0, Poisson(0.2), 8, ADD, Unit.RECORD),
    "sets": (1.0, MiniSets(10, 8, chosen=1), 8, ADD, Unit.MINI_SET),
    "revealed": (1.0, MiniSets(20, 5, chosen=2), 10, ADD, Unit.RECORD),
}


@pytest.mark.parametrize(
    ("z", "scheme", "steps", "relation", "unit"), PROFILED.values(), ids=PROFILED
)
def test_the_profile_is_that_of_the_distribution(z, scheme, steps, relation, unit):
    """Against sums over all losses, and ε(δ) against the one that is reported."""
    under = REPLACE if unit is Unit.MINI_SET else relation
    loss = privacy_loss(Plan(scheme, z, relation, steps, unit).event(steps), under)
    epsilons, deltas = profile_of(loss, count=50)
    theirs = np.max([deltas_of_losses(direction, epsilons) for direction in loss], axis=0)
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


# The best test there is, played out: its errors lie on the curve, not below it.


Z, RATE, STEPS, PLAYED = 0.9, 0.25, 6, 100_000
# Four standard deviations of a share of PLAYED games.
NOISE = 4 * 0.5 / math.sqrt(PLAYED)


def played(member: bool, draws: np.random.Generator) -> np.ndarray:
    """log P/Q of all steps, where a member joins each step with probability `RATE`."""
    joined = draws.random((PLAYED, STEPS)) < (RATE if member else 0.0)
    seen = joined + Z * draws.standard_normal((PLAYED, STEPS))
    return np.log1p(RATE * np.expm1((seen - 0.5) / Z**2)).sum(axis=1)


@pytest.fixture(scope="module")
def errors():
    """(type I, type II) of the likelihood-ratio test at many thresholds, in both directions."""
    draws = np.random.default_rng(0)
    there, absent = np.sort(played(True, draws)), np.sort(played(False, draws))
    cuts = np.quantile(np.concatenate([there, absent]), np.linspace(0.005, 0.995, 100))
    missed = np.searchsorted(there, cuts) / PLAYED
    alarmed = 1 - np.searchsorted(absent, cuts) / PLAYED
    return np.concatenate([alarmed, missed]), np.concatenate([missed, alarmed])


def test_the_best_test_does_not_beat_the_curve(errors):
    curve = trade_off(Z, Poisson(RATE), STEPS, relation=ADD)
    type_one, type_two = errors
    assert np.all(type_two >= curve(np.minimum(type_one + NOISE, 1.0)) - NOISE)


def test_it_comes_close_in_one_direction(errors):
    """The curve is the envelope of both directions: at each slope one of them touches it."""
    curve = trade_off(Z, Poisson(RATE), STEPS, relation=ADD)
    type_one, type_two = errors
    advantage = np.max(1 - type_one - type_two)
    assert advantage == pytest.approx(curve.advantage, abs=2 * NOISE)


@pytest.mark.parametrize("planted", [(Z, RATE, STEPS - 2), (1.3 * Z, RATE, STEPS), (Z, 0.2, STEPS)])
def test_it_beats_the_curve_of_a_weaker_run(errors, planted):
    """Planted: two steps not counted, the noise taken for more, the rate for less."""
    z, rate, steps = planted
    curve = trade_off(z, Poisson(rate), steps, relation=ADD)
    type_one, type_two = errors
    assert np.any(type_two < curve(np.minimum(type_one + NOISE, 1.0)) - NOISE)
