"""Without sampling the answer is known in closed form, at any extreme.  [Balle & Wang 2018]"""

import math

import pytest
from hockey_stick import gaussian_epsilon
from tiny_run import ADD, REPLACE

from tacit import epsilon
from tacit.sampling import MiniSets, Poisson, ShuffledEpochs, WithoutReplacement


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("z", "steps"),
    [(0.05, 1), (0.05, 1000), (0.3, 37), (1.0, 1), (4.0, 100_000), (1000.0, 1), (1000.0, 100_000)],
)
def test_full_batches_are_gaussian_mechanisms(z, steps, relation):
    for delta in (1e-12, 1e-9, 1e-5, 0.01, 0.5):
        exact = gaussian_epsilon(delta, math.sqrt(steps) / z)
        found = epsilon(z, Poisson(1.0), steps, delta=delta, relation=relation)
        assert found >= exact * (1 - 1e-9)
        assert found == pytest.approx(exact, rel=3e-3, abs=1e-6)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.01])
def test_shuffled_epochs_are_one_gaussian_an_epoch(delta):
    for epochs in (1, 7):
        for steps in (epochs * 10, epochs * 10 - 9):
            found = epsilon(2.0, ShuffledEpochs(10), steps, delta=delta, relation=REPLACE)
            assert found == pytest.approx(gaussian_epsilon(delta, math.sqrt(epochs) / 2), rel=1e-4)


# These take the road of convolutions to the same place, so they check its rounding.
CONVOLVED = {
    "everybody drawn without replacement": WithoutReplacement(10, 10),
    "every mini-set drawn, and revealed": MiniSets(10, 5, rate=1.0),
    "everybody but one in a million": Poisson(1 - 1e-9),
}


@pytest.mark.parametrize("scheme", CONVOLVED.values(), ids=list(CONVOLVED))
@pytest.mark.parametrize(
    ("z", "steps", "delta"),
    [(1.0, 1, 1e-9), (30.0, 100, 1e-12), (30.0, 100, 0.1), (100.0, 10_000, 1e-8)],
)
def test_convolutions_end_where_the_closed_form_does(scheme, z, steps, delta):
    exact = gaussian_epsilon(delta, math.sqrt(steps) / z)
    found = epsilon(z, scheme, steps, delta=delta, relation=REPLACE)
    assert found >= exact * (1 - 1e-4)
    assert found == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("scheme", CONVOLVED.values(), ids=list(CONVOLVED))
@pytest.mark.parametrize(("z", "delta"), [(300.0, 1e-12), (300.0, 1e-10), (1000.0, 1e-10)])
def test_the_rounding_of_a_hundred_thousand_convolutions_is_paid_for(scheme, z, delta):
    """ε must stay an upper bound where T roundings of 1e-16 are no longer small beside δ."""
    steps = 100_000
    exact = gaussian_epsilon(delta, math.sqrt(steps) / z)
    found = epsilon(z, scheme, steps, delta=delta, relation=REPLACE)
    assert found >= exact * (1 - 1e-4)
