"""The file is the ledger: it outlives processes, and holds to what it was made for."""

import dp_accounting as dpa
import pytest
from tiny_run import ADD, REPLACE, ROOMY, gaussian_plan, release

from tacit import Budget, Ledger
from tacit.accounting import Plan
from tacit.errors import BudgetExceeded, PlanChanged
from tacit.sampling import Poisson

PLAN = gaussian_plan(steps=20)


def test_it_survives_reopening(tmp_path):
    path = tmp_path / "deep" / "down" / "ledger"
    with Ledger(path, ROOMY) as ledger:
        release(ledger, PLAN, 7)
        before = ledger.statement()
    with Ledger(path) as again:
        assert again.budget == ROOMY
        (run,) = again.statement().runs
        assert run.steps == 7
        assert run.plan == PLAN
    assert before.runs[0].plan == PLAN


@pytest.mark.parametrize(
    "other", [Budget(3.1, 1e-5), Budget(3.0, 1e-6), Budget(3.0, 1e-5, REPLACE), Budget(2.0, 1e-5)]
)
def test_another_budget_is_refused(other, tmp_path):
    Ledger(tmp_path / "ledger", ROOMY).close()
    with pytest.raises(ValueError, match="made for"):
        Ledger(tmp_path / "ledger", other)
    assert Ledger(tmp_path / "ledger").budget == ROOMY


def test_no_file_and_no_budget_is_refused(tmp_path):
    with pytest.raises(ValueError, match="give a budget"):
        Ledger(tmp_path / "ledger")
    with pytest.raises(ValueError, match="give a budget"):
        Ledger()
    assert not (tmp_path / "ledger").exists()


def test_another_relation_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "ledger", ROOMY)
    with pytest.raises(ValueError, match="relation"):
        ledger.begin(Plan(Poisson(1.0), 10.0, REPLACE, 5))
    with pytest.raises(ValueError, match="relation"):
        ledger.begin(PLAN, budget=Budget(1.0, 1e-5, REPLACE))
    assert ledger.statement().runs == ()


def test_a_named_run_goes_on_where_it_stopped(tmp_path):
    for _ in range(3):
        with Ledger(tmp_path / "ledger", ROOMY) as ledger:
            ledger.begin(PLAN, name="mine")
            release(ledger, PLAN, 8)
    with Ledger(tmp_path / "ledger") as ledger:
        (run,) = ledger.statement().runs
        assert (run.steps, run.step_limit) == (20, 20)


@pytest.mark.parametrize(
    "other",
    [gaussian_plan(11.0, 20), gaussian_plan(10.0, 21), Plan(Poisson(0.5), 10.0, ADD, 20)],
)
def test_another_plan_under_that_name_is_refused(other, tmp_path):
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        ledger.begin(PLAN, name="mine")
        release(ledger, PLAN, 3)
    with Ledger(tmp_path / "ledger") as ledger:
        with pytest.raises(PlanChanged, match="name of its own"):
            ledger.begin(other, name="mine")
        assert ledger.statement().runs[0].steps == 3


def test_a_run_s_own_budget_holds_when_it_is_smaller(tmp_path):
    own = Budget(1.0, 1e-5)
    plan = gaussian_plan(10.0)
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        ledger.begin(plan, name="mine", budget=own)
        assert release(ledger, plan, 1000) == plan.steps_within(own)


def test_a_smaller_budget_holds_also_when_a_run_goes_on(tmp_path):
    smaller = Budget(1.0, 1e-5)
    plan = gaussian_plan(10.0)
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        ledger.begin(plan, name="mine")
        release(ledger, plan, 1)
        ledger.begin(plan, name="mine", budget=smaller)
        assert 1 + release(ledger, plan, 1000) <= plan.steps_within(smaller)


def test_a_larger_budget_than_the_ledger_s_does_not_help(tmp_path):
    plan = gaussian_plan(10.0)
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        ledger.begin(plan, budget=Budget(30.0, 1e-5))
        assert release(ledger, plan, 1000) == plan.steps_within(ROOMY)


def test_a_prelude_is_on_record_even_when_no_step_was_taken(tmp_path):
    plan = gaussian_plan(10.0, 5, prelude=(dpa.GaussianDpEvent(3.0),))
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        ledger.begin(plan, name="mine")
        ledger.end()
        (run,) = ledger.statement().runs
        assert run.epsilon == plan.epsilon(0, 1e-5) > 0


def test_a_prelude_that_passes_the_budget_is_refused_before_it_is_released(tmp_path):
    plan = gaussian_plan(10.0, 5, prelude=(dpa.GaussianDpEvent(0.3),))
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        with pytest.raises(BudgetExceeded, match="nothing is charged"):
            ledger.begin(plan)
        assert ledger.statement().runs == ()


def test_a_second_runs_prelude_is_held_to_the_filter(tmp_path):
    first, second = (
        gaussian_plan(10.0, 30),
        gaussian_plan(50.0, 5, prelude=(dpa.GaussianDpEvent(1.9),)),
    )
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        ledger.begin(first)
        assert release(ledger, first, 30) == 30
        with pytest.raises(BudgetExceeded, match="nothing is charged"):
            ledger.begin(second)
        assert len(ledger.statement().runs) == 1


def test_a_plan_without_noise_releases_nothing(tmp_path):
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        assert release(ledger, gaussian_plan(0.0, 5), 5) == 0
