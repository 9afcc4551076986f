"""A plan is data, refuses what has no sound analysis, and is solved in three directions."""

from __future__ import annotations

import json
import math

import attr
import dp_accounting as dpa
import numpy as np
import pytest
from brute_force import gaussian_epsilon
from tiny_run import ADD, REPLACE, ROOMY, gradient, one_weight

from tacit import Budget, Ledger, calibrate, epsilon, steps_within
from tacit.accounting import Plan
from tacit.accounting.plan import epsilon_of_event
from tacit.accounting.rdp import renyi_curve
from tacit.errors import BudgetExceeded, PlanChanged, UnsupportedEvent
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


# What has no sound analysis is refused, and the message says what to do instead.


ONE = dpa.GaussianDpEvent(1.0)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class UnheardOf(dpa.DpEvent):
    noise: float = 1.0


@attr.s(frozen=True, slots=True, auto_attribs=True)
class Wrapping(dpa.DpEvent):
    event: dpa.DpEvent = ONE


def nothing(event):
    return event


def inside(event):
    return dpa.ComposedDpEvent([ONE, dpa.SelfComposedDpEvent(event, 3)])


REFUSED = {
    "poisson of a composition": dpa.PoissonSampledDpEvent(0.1, dpa.ComposedDpEvent([ONE, ONE])),
    "poisson of many": dpa.PoissonSampledDpEvent(0.1, dpa.SelfComposedDpEvent(ONE, 3)),
    "poisson of laplace": dpa.PoissonSampledDpEvent(0.1, dpa.LaplaceDpEvent(1.0)),
    "poisson of poisson": dpa.PoissonSampledDpEvent(0.1, dpa.PoissonSampledDpEvent(0.1, ONE)),
    "laplace": dpa.LaplaceDpEvent(1.0),
    "tree": dpa.SingleEpochTreeAggregationDpEvent(1.0, 8),
    "with replacement": dpa.SampledWithReplacementDpEvent(100, 10, ONE),
    "of a composition": dpa.SampledWithoutReplacementDpEvent(9, 3, dpa.ComposedDpEvent([ONE])),
    "unheard of": UnheardOf(),
    "unknown wrapper": Wrapping(),
    "unsupported": dpa.UnsupportedDpEvent(),
}


@pytest.mark.parametrize("event", REFUSED.values(), ids=list(REFUSED))
@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("where", [nothing, inside])
def test_refused_by_both_accountants(event, relation, where):
    for account in (
        lambda e: epsilon_of_event(e, 1e-5, relation),
        lambda e: renyi_curve(e, relation),
    ):
        with pytest.raises(UnsupportedEvent, match=r"known are|joint noise multiplier"):
            account(where(event))


def test_a_refusal_of_many_blocks_names_the_joint_multiplier():
    event = REFUSED["poisson of a composition"]
    with pytest.raises(UnsupportedEvent, match="joint noise multiplier of all blocks"):
        epsilon_of_event(event, 1e-5, ADD)


@pytest.mark.parametrize("scheme", [WithoutReplacement(100, 10), ShuffledEpochs(10)])
def test_schemes_that_move_the_others_are_for_replace_one(scheme):
    with pytest.raises(UnsupportedEvent, match=r"REPLACE_ONE|PoissonSampler"):
        epsilon(1.0, scheme, 10, delta=1e-5, relation=ADD)
    with pytest.raises(UnsupportedEvent, match=r"REPLACE_ONE|PoissonSampler"):
        Plan(scheme, 1.0, ADD, 10)
    assert epsilon(1.0, scheme, 10, delta=1e-5, relation=REPLACE) > 0


def test_the_event_itself_is_refused_under_add_or_remove():
    event = dpa.SampledWithoutReplacementDpEvent(100, 10, ONE)
    with pytest.raises(UnsupportedEvent, match="replace-one only"):
        epsilon_of_event(event, 1e-5, ADD)
    with pytest.raises(UnsupportedEvent, match="replace-one only"):
        renyi_curve(event, ADD)


def test_a_shuffled_epoch_gets_no_poisson_epsilon():
    epochs, per_epoch = 5, 20
    shuffled = epsilon(
        2.0, ShuffledEpochs(per_epoch), epochs * per_epoch, delta=1e-5, relation=REPLACE
    )
    poisson = epsilon(2.0, Poisson(1 / 20), epochs * per_epoch, delta=1e-5, relation=REPLACE)
    assert shuffled == pytest.approx(gaussian_epsilon(1e-5, 5**0.5 / 2), rel=1e-4)
    assert shuffled > 2 * poisson


def test_a_bound_on_mini_sets_needs_mini_sets():
    """Sets cut from a Poisson sample by position shift when one record comes in."""
    from tacit.sampling.scheme import Unit

    for scheme in (Poisson(0.1), WithoutReplacement(100, 10), ShuffledEpochs(10)):
        with pytest.raises((UnsupportedEvent, ValueError)):
            Plan(scheme, 1.0, REPLACE, 10, unit=Unit.MINI_SET)


# ε from noise, noise from ε, steps from both.


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
        calibrate(Budget(1e-7, 1e-200), Poisson(0.5), 10)


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
