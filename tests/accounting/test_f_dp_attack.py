"""The best test there is, played out: its errors must lie on the curve, not below it."""

import math

import numpy as np
import pytest
from tiny_run import ADD

from tacit import trade_off
from tacit.sampling import Poisson

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
