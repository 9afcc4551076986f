"""Figures that other people and other programs arrived at, at δ = 1e-5."""

import math

import pytest
from tiny_run import REPLACE

from tacit import Budget, calibrate, epsilon
from tacit.accounting import epsilon_rdp
from tacit.sampling import Poisson, WithoutReplacement

DELTA = 1e-5

# records, batch, epochs, noise, ε by PLD, ε by RDP
POISSON = [
    (50_000, 1024, 30, 1.54, 2.387, 2.61),
    (60_000, 2048, 40, 2.15, 2.390, 2.60),
    (60_000, 512, 40, 1.23, 2.364, 2.58),
]


@pytest.mark.parametrize(("size", "batch", "epochs", "z", "by_pld", "by_rdp"), POISSON)
def test_poisson_epsilon(size, batch, epochs, z, by_pld, by_rdp):
    scheme, steps = Poisson(batch / size), round(epochs * size / batch)
    assert epsilon(z, scheme, steps, delta=DELTA) == pytest.approx(by_pld, rel=5e-3)
    assert epsilon_rdp(z, scheme, steps, delta=DELTA) == pytest.approx(by_rdp, rel=5e-3)


def test_poisson_epsilon_of_a_long_run():
    assert epsilon(1.5, Poisson(0.04), 2250, delta=DELTA) == pytest.approx(6.769, rel=5e-3)
    assert epsilon_rdp(1.5, Poisson(0.04), 2250, delta=DELTA) == pytest.approx(7.329, rel=5e-3)


@pytest.mark.parametrize(("sigma", "expected"), [(2.5, 2.083), (1.5, 9.697)])
def test_without_replacement_epsilon(sigma, expected):
    scheme, steps = WithoutReplacement(54_000, 64), round(50 * 54_000 / 64)
    found = epsilon(sigma / math.sqrt(8), scheme, steps, delta=DELTA, relation=REPLACE)
    assert found == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    ("size", "batch", "epochs", "expected"),
    [(50_000, 1024, 30, 1.32), (60_000, 2048, 40, 1.81), (60_000, 512, 40, 1.07)],
)
def test_calibrated_noise_for_epsilon_three(size, batch, epochs, expected):
    z = calibrate(Budget(3.0, DELTA), Poisson(batch / size), round(epochs * size / batch))
    assert round(z, 2) == expected


@pytest.mark.parametrize(
    ("z", "q", "steps", "delta", "expected"),
    [(4.0, 0.01, 10_000, 1e-5, 1.2), (1.1, 256 / 60_000, 14_063, 1e-5, 2.92)],
)
def test_the_literature_s_rdp_figures_are_upper_bounds(z, q, steps, delta, expected):
    """MNIST at noise 1.1, 60 epochs of 256: the tutorial's 3.0; Abadi et al.: 1.26."""
    assert epsilon(z, Poisson(q), steps, delta=delta) <= expected * 1.06
    assert epsilon_rdp(z, Poisson(q), steps, delta=delta) <= expected * 1.06
