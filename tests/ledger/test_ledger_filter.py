"""Several runs, each chosen after looking at the last: together they keep to the budget."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from tiny_run import ADD, ROOMY, charged, gaussian_plan, release

from tacit import Budget, Ledger
from tacit.accounting import Plan
from tacit.accounting.rdp import ORDERS, allowance, best_order, epsilon_at, renyi_curve
from tacit.errors import BudgetExceeded
from tacit.sampling import MiniSets, Poisson

TIGHT = gaussian_plan(10.0)  # takes all that PLD allows: more than RDP would


def order_of(statement):
    """The order that the statement names: every other number is computed at it."""
    return float(statement.method.removeprefix("RDP filter at order "))


def epsilon_of_gaussians(order, inverse_squares, delta):
    """ε of Gaussians with Σ 1/z² known, at one order: written out again, from the papers."""
    rho = order / 2 * inverse_squares
    return rho + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1)


def test_the_allowance_is_what_the_conversion_leaves():
    for order in (1.5, 4.0, 20):
        room = allowance(order, ROOMY)
        assert epsilon_of_gaussians(order, 2 * room / order, 1e-5) == pytest.approx(3.0)
        assert epsilon_at(order, room, ROOMY) == pytest.approx(3.0)
    assert epsilon_at(4.0, 0.0, ROOMY) == 0


def test_the_order_fits_most_copies_of_the_first_run():
    curve = renyi_curve(dpa.GaussianDpEvent(10.0), ADD)
    copies = [allowance(a, ROOMY) / rho for a, rho in zip(ORDERS, curve, strict=True)]
    assert best_order(curve, ROOMY) == ORDERS[int(np.argmax(copies))]


@pytest.mark.parametrize("seed", range(6))
def test_runs_chosen_by_looking_never_pass_the_budget(seed, tmp_path):
    """Random plans, some stopped early, some crashed, the next one depending on the last."""
    draws = np.random.default_rng(seed)
    path, spent = tmp_path / "ledger", 0.0
    looked = 0.0
    for _ in range(12):
        z = float(10 ** draws.uniform(0.9, 1.8)) * (1 + 0.5 * (looked > 0))
        plan = gaussian_plan(z, int(draws.integers(1, 30)))
        ledger = Ledger(path, ROOMY, lease_steps=int(draws.integers(1, 9)))
        try:
            ledger.begin(plan)
        except BudgetExceeded:
            ledger.close()
            break
        done = release(ledger, plan, int(draws.integers(1, 40)))
        looked = float(draws.normal())
        if draws.random() < 0.7:
            ledger.close()
        spent += done / z**2
    statement = Ledger(path).statement()
    assert statement.epsilon_charged <= ROOMY.epsilon + 1e-9
    assert statement.epsilon <= ROOMY.epsilon
    if len(statement.runs) > 1:
        order = order_of(statement)
        assert epsilon_of_gaussians(order, spent, 1e-5) <= ROOMY.epsilon + 1e-9
    assert all(run.epsilon <= ROOMY.epsilon for run in statement.runs)


def test_many_runs_fill_the_budget_and_not_more(tmp_path):
    plan, done = gaussian_plan(10.0, 10), []
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        for _ in range(8):
            ledger.begin(plan)
            done.append(release(ledger, plan, 10))
        statement = ledger.statement()
    assert statement.epsilon_charged <= ROOMY.epsilon
    order = order_of(statement)
    total = sum(done)
    assert epsilon_of_gaussians(order, total / 100, 1e-5) <= 3.0
    assert epsilon_of_gaussians(order, (total + 1) / 100, 1e-5) > 3.0
    assert done[-1] == 0


def test_mixed_schemes_share_one_order(tmp_path):
    plans = [
        Plan(Poisson(0.1), 3.0, ADD, 20),
        Plan(MiniSets(50, 4, rate=0.2), 9.0, ADD, 10),
        gaussian_plan(20.0, 40),
        Plan(Poisson(0.2), 4.0, ADD, 30),
    ]
    done = []
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        for plan in plans:
            ledger.begin(plan)
            done.append(release(ledger, plan, plan.steps))
        found = ledger.statement()
    at = ORDERS.index(order_of(found))
    curves = [renyi_curve(plan.step_event, ADD) for plan in plans]
    spent = sum(steps * curve[at] for steps, curve in zip(done, curves, strict=True))
    assert found.epsilon == ROOMY.epsilon  # what the filter guarantees
    assert found.epsilon_charged == pytest.approx(epsilon_at(ORDERS[at], spent, ROOMY))
    assert found.epsilon_charged <= ROOMY.epsilon


def test_the_first_run_may_take_all_but_then_it_is_alone(tmp_path):
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        ledger.begin(TIGHT, name="first")
        release(ledger, TIGHT, 2)
        with pytest.raises(BudgetExceeded, match="larger budget"):
            ledger.begin(gaussian_plan(1000.0, 1))
        ledger.begin(TIGHT, name="first")
        assert 2 + release(ledger, TIGHT, 1000) == TIGHT.steps_within(ROOMY)
        with pytest.raises(BudgetExceeded):
            ledger.begin(gaussian_plan(1000.0, 1), name="second")
        (run,) = ledger.statement().runs
        assert run.exclusive


def test_a_second_run_is_never_exclusive(tmp_path):
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        small = gaussian_plan(50.0, 1)
        release(ledger, small)
        ledger.begin(TIGHT)
        done = release(ledger, TIGHT, 1000)
        assert done < TIGHT.steps_within(ROOMY)
        order = order_of(ledger.statement())
        assert epsilon_of_gaussians(order, 1 / 2500 + done / 100, 1e-5) <= 3.0
        assert not any(run.exclusive for run in ledger.statement().runs)


def test_an_exclusive_run_that_released_nothing_frees_the_ledger(tmp_path):
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        ledger.begin(TIGHT)
        ledger.begin(gaussian_plan(50.0, 1))
        assert release(ledger, gaussian_plan(50.0, 1)) == 1


def test_a_run_begun_beside_an_unused_one_is_held_to_the_same_order(tmp_path):
    """The first run fixes the order; when it leaves without a trace, the order stays fixed."""
    path = tmp_path / "ledger"
    first, second, third = Ledger(path, ROOMY), Ledger(path), Ledger(path)
    first.begin(gaussian_plan(30.0, 3))
    second.begin(gaussian_plan(20.0, 3))
    release(second, gaussian_plan(20.0, 3), 2)
    third.begin(gaussian_plan(19.0, 3))
    release(third, gaussian_plan(19.0, 3), 1)
    order = order_of(third.statement())
    first.end()
    assert order_of(third.statement()) == order
    assert charged(path) >= 2


def test_what_a_run_may_spend_does_not_depend_on_delta_tricks(tmp_path):
    """A run's own δ is larger than the ledger's: the ledger's still holds."""
    plan = gaussian_plan(10.0)
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        ledger.begin(plan, budget=Budget(3.0, 0.1))
        assert release(ledger, plan, 1000) == plan.steps_within(ROOMY)
