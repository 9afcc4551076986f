"""A plan is data: it survives a trip through text, and a run keeps to it."""

import json
import math

import dp_accounting as dpa
import numpy as np
import pytest
from tiny_run import ADD, REPLACE, ROOMY, gradient, one_weight

from tacit import Ledger
from tacit.accounting import Plan
from tacit.errors import PlanChanged
from tacit.sampling import MiniSets, Poisson, ShuffledEpochs, WithoutReplacement
from tacit.sampling.scheme import Unit

PLANS = [
    Plan(Poisson(0.1 + 0.2), 1 / 3, ADD, 100),
    Plan(Poisson(1e-300), 1e300, REPLACE, None),
    Plan(Poisson(1.0), math.inf, ADD, 0),
    Plan(WithoutReplacement(54_000, 64), 2.5 / math.sqrt(8), REPLACE, 10),
    Plan(ShuffledEpochs(7), 1.0, REPLACE, 70),
    Plan(MiniSets(10, 5, chosen=3), 1.0, ADD, 7, unit=Unit.MINI_SET),
    Plan(MiniSets(10, 5, rate=0.3), 1.0, REPLACE, 7),
    Plan(Poisson(0.1), 2.0, ADD, 5, prelude=(dpa.GaussianDpEvent(4.0), dpa.GaussianDpEvent(9.5))),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.scheme.describe())
def test_round_trip_through_json(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    json.loads(plan.to_json())


def test_different_plans_have_different_texts():
    assert len({plan.to_json() for plan in PLANS}) == len(PLANS)


@pytest.mark.parametrize(
    "event",
    [dpa.LaplaceDpEvent(1.0), dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(1.0))],
    ids=["laplace", "poisson"],
)
def test_a_prelude_that_cannot_be_written_down_is_refused_by_name(event):
    """Laplace has a noise_multiplier too: read back as a Gaussian it would cost less."""
    with pytest.raises((ValueError, TypeError), match=r"prelude|Gaussian|analys"):
        Plan(Poisson(0.1), 1.0, ADD, 5, prelude=(event,)).to_json()


def test_numbers_from_numpy_are_numbers():
    plan = Plan(Poisson(np.float64(0.1)), np.float64(2.0), ADD, np.int64(5))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "other",
    [
        Plan(Poisson(1.0), 9.9, ADD, 50),
        Plan(Poisson(0.9), 10.0, ADD, 50),
        Plan(Poisson(1.0), 10.0, REPLACE, 50),
        Plan(Poisson(1.0), 10.0, ADD, 51),
        Plan(MiniSets(5, 2, rate=1.0), 10.0, ADD, 50),
        Plan(Poisson(1.0), 10.0, ADD, 50, prelude=(dpa.GaussianDpEvent(50.0),)),
    ],
)
def test_a_run_cannot_change_its_plan(other, tmp_path):
    plan = Plan(Poisson(1.0), 10.0, ADD, 50)
    model = one_weight()
    with Ledger(tmp_path / "ledger", ROOMY, lease_steps=1) as ledger:
        ledger.release(gradient(plan, model), into=model)
        before = model.weight.grad.clone()
        with pytest.raises(PlanChanged, match="begin another run"):
            ledger.release(gradient(other, model), into=model)
        assert model.weight.grad.equal(before)
        assert ledger.run_status() == (1, 50)


@pytest.mark.parametrize("z", [-1.0, math.nan])
def test_noise_below_nothing(z):
    with pytest.raises(ValueError, match="noise multiplier"):
        Plan(Poisson(0.1), z, ADD)


def test_any_change_inside_a_mini_set_is_a_replacement():
    plan = Plan(MiniSets(10, 5, rate=0.3), 1.0, ADD, 7, unit=Unit.MINI_SET)
    assert plan.accounted_relation is REPLACE
    assert plan.epsilon(7, 1e-5) == Plan(Poisson(0.3), 1.0, REPLACE, 7).epsilon(7, 1e-5)
