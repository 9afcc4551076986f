"""Many processes on one file never overspend together."""

import multiprocessing

import pytest
from ledger_children import CLEAN, race
from tiny_run import ROOMY, gaussian_plan

from tacit import Budget, Ledger

TIGHT = gaussian_plan(10.0)
LIMIT = TIGHT.steps_within(ROOMY)


def total_within_filter(path, budget=ROOMY):
    statement = Ledger(path).statement()
    assert statement.epsilon <= budget.epsilon
    return statement


def test_two_spawned_processes(tmp_path):
    jobs = [("mine", TIGHT, 500)] * 2
    found = race(multiprocessing.get_context("spawn"), tmp_path / "ledger", ROOMY, jobs)
    assert sum(steps for _, steps in found) <= LIMIT
    assert Ledger(tmp_path / "ledger").statement().runs[0].steps == sum(n for _, n in found)


@pytest.mark.parametrize("lease_steps", [1, 7, 64])
def test_four_processes_share_one_run(lease_steps, tmp_path):
    jobs = [("mine", TIGHT, 500)] * 4
    found = race(CLEAN, tmp_path / "ledger", ROOMY, jobs, lease_steps)
    done = sum(steps for _, steps in found)
    assert done <= LIMIT
    (run,) = Ledger(tmp_path / "ledger").statement().runs
    assert run.exclusive
    assert run.steps == done


def test_only_one_of_four_is_let_in_alone(tmp_path):
    found = race(CLEAN, tmp_path / "ledger", ROOMY, [(None, TIGHT, 500)] * 4)
    ran = [steps for what, steps in found if what == "ran" and steps]
    # The others were refused, unless they came when the first had ended without a trace.
    assert ran == [LIMIT]


@pytest.mark.parametrize("lease_steps", [1, 8])
def test_four_runs_through_the_filter(lease_steps, tmp_path):
    jobs = [(f"run {i}", gaussian_plan(8.0 + i, 25), 25) for i in range(4)]
    found = race(CLEAN, tmp_path / "ledger", ROOMY, jobs, lease_steps)
    statement = total_within_filter(tmp_path / "ledger")
    assert sum(run.steps for run in statement.runs) == sum(steps for _, steps in found)
    assert sum(steps for _, steps in found) < 100  # the budget did bind
    assert not any(run.exclusive for run in statement.runs)


def test_opening_a_fresh_file_together_is_no_accident(tmp_path):
    jobs = [(f"run {i}", gaussian_plan(50.0, 2), 2) for i in range(4)]
    for i in range(12):
        race(CLEAN, tmp_path / f"ledger {i}", Budget(3.0, 1e-13), jobs, fresh=True)
        assert len(Ledger(tmp_path / f"ledger {i}").statement().runs) == 4
