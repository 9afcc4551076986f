"""ε from noise, noise from ε, steps from both: three directions of one function."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from tiny_run import ADD, REPLACE

from tacit import Budget, calibrate, epsilon, steps_within
from tacit.errors import BudgetExceeded
from tacit.sampling import MiniSets, Poisson, ShuffledEpochs, WithoutReplacement

PRELUDE = (dpa.GaussianDpEvent(8.0), dpa.GaussianDpEvent(12.0))


def random_settings(count, seed):
    draws = np.random.default_rng(seed)
    for i in range(count):
        q = float(10 ** draws.uniform(-3, -0.5))
        scheme, relation = [
            (Poisson(q), ADD),
            (Poisson(q), REPLACE),
            (WithoutReplacement(2000, max(1, round(2000 * q))), REPLACE),
            (MiniSets(300, 5, rate=q), ADD),
            (ShuffledEpochs(7), REPLACE),
            (Poisson(1.0), ADD),
        ][i % 6]
        target = float(10 ** draws.uniform(-0.2, 1.0))
        budget = Budget(target, float(10 ** draws.uniform(-8, -4)), relation)
        prelude = PRELUDE if i % 6 > 3 else ()
        z, steps = float(10 ** draws.uniform(-0.1, 0.8)), int(draws.integers(1, 800))
        yield budget, scheme, z, steps, prelude


@pytest.mark.parametrize(
    ("budget", "scheme", "z", "steps", "prelude"), list(random_settings(12, seed=0))
)
def test_one_more_step_would_pass_the_budget(budget, scheme, z, steps, prelude):
    steps = steps_within(budget, z, scheme, prelude=prelude)

    def spent(count):
        settings = {"delta": budget.delta, "relation": budget.relation, "prelude": prelude}
        return epsilon(z, scheme, count, **settings)

    assert spent(steps + 1) > budget.epsilon
    assert steps == 0 or spent(steps) <= budget.epsilon


@pytest.mark.parametrize(
    ("budget", "scheme", "z", "steps", "prelude"), list(random_settings(6, seed=1))
)
def test_calibrated_noise_just_fits(budget, scheme, z, steps, prelude):
    found = calibrate(budget, scheme, steps, prelude=prelude)
    settings = {"delta": budget.delta, "relation": budget.relation, "prelude": prelude}
    spent = epsilon(found, scheme, steps, **settings)
    assert 0.999 * budget.epsilon <= spent <= budget.epsilon
    assert epsilon(found * 0.99, scheme, steps, **settings) > budget.epsilon


def test_what_came_before_counts():
    budget, everybody = Budget(2.0, 1e-5), Poisson(1.0)
    assert steps_within(budget, 9.0, everybody, prelude=PRELUDE) < steps_within(
        budget, 9.0, everybody
    )
    assert calibrate(budget, everybody, 9, prelude=PRELUDE) > calibrate(budget, everybody, 9)


def test_a_prelude_that_spends_everything_leaves_nothing():
    all_spent = (dpa.GaussianDpEvent(0.5),)
    budget = Budget(1.0, 1e-5)
    with pytest.raises(BudgetExceeded, match="before the run"):
        calibrate(budget, Poisson(0.01), 10, prelude=all_spent)
    assert steps_within(budget, 1.0, Poisson(0.01), prelude=all_spent) == 0


def test_a_budget_that_no_noise_can_meet():
    with pytest.raises(BudgetExceeded, match="noise multiplier"):
        calibrate(Budget(0.1, 1e-200), Poisson(0.5), 10)


def test_no_steps_need_no_noise_and_no_noise_takes_no_steps():
    assert calibrate(Budget(1.0, 1e-5), Poisson(0.1), 0) == 0
    assert steps_within(Budget(1.0, 1e-5), 0.0, Poisson(0.1)) == 0


@pytest.mark.parametrize(
    ("budget", "rate"),
    [
        (Budget(1.0, 1e-5), 1e-6),  # δ alone pays for being drawn at all: ε is 0 whatever the noise
        (Budget(1e6, 1e-5), 1e-3),  # more budget than any noise worth the name can spend
    ],
)
def test_a_budget_that_next_to_no_noise_meets(budget, rate):
    z = calibrate(budget, Poisson(rate), 1)
    assert 0 <= z < math.inf
    assert z == 0 or epsilon(z, Poisson(rate), 1, delta=budget.delta) <= budget.epsilon


def test_a_sampler_brings_its_own_steps():
    import torch

    from tacit import PoissonSampler, Records

    records = Records(torch.zeros(100, 1), torch.zeros(100), public_size=100)
    sampler = PoissonSampler(records, expected_batch_size=10, steps=50)
    budget = Budget(2.0, 1e-5)
    assert calibrate(budget, sampler) == calibrate(budget, Poisson(0.1), 50)
    assert epsilon(1.0, sampler, delta=1e-5) == epsilon(1.0, Poisson(0.1), 50, delta=1e-5)
    with pytest.raises(ValueError, match="steps"):
        epsilon(1.0, Poisson(0.1), delta=1e-5)


def test_a_run_of_mini_sets_costs_what_its_plan_says():
    """`unit` alone must be enough: a changed mini-set is a replaced one, whatever the relation."""
    from tacit.accounting import Plan
    from tacit.sampling.scheme import Unit

    scheme = MiniSets(100, 10, chosen=5)
    plan = Plan(scheme, 2.0, ADD, 100, unit=Unit.MINI_SET)
    found = epsilon(2.0, scheme, 100, delta=1e-5, relation=ADD, unit=Unit.MINI_SET)
    assert found == plan.epsilon(100, 1e-5)
