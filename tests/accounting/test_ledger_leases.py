"""A crash wastes at most one lease; an end in good order wastes nothing."""

import pytest
from tiny_run import ADD, ROOMY, charged, gaussian_plan, release

from tacit import Budget, Ledger, Plan, Poisson, steps_within
from tacit.errors import PlanChanged

PLAN = gaussian_plan(steps=40)


@pytest.mark.parametrize("lease_steps", [1, 5, 64])
@pytest.mark.parametrize("steps", [1, 5, 7])
def test_a_lease_is_charged_whole_and_given_back(steps, lease_steps, tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(path, ROOMY, lease_steps=lease_steps)
    release(ledger, PLAN, steps)
    assert steps <= charged(path) < steps + lease_steps
    assert charged(path) <= 40
    assert ledger.run_status() == (steps, 40)
    ledger.close()
    assert charged(path) == steps


@pytest.mark.parametrize("lease_steps", [1, 5, 64])
def test_a_crash_keeps_what_was_charged(lease_steps, tmp_path):
    path = tmp_path / "ledger"
    crashed = Ledger(path, ROOMY, lease_steps=lease_steps)
    crashed.begin(PLAN, name="mine")
    release(crashed, PLAN, 3)
    held = charged(path)
    del crashed
    with Ledger(path, lease_steps=lease_steps) as again:
        again.begin(PLAN, name="mine")
        assert again.run_status() == (held, 40)
        assert release(again, PLAN, 100) == 40 - held
    assert held - 3 < lease_steps


def test_giving_back_happens_once(tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(path, ROOMY, lease_steps=10)
    release(ledger, PLAN, 3)
    ledger.end()
    ledger.end()
    ledger.close()
    assert charged(path) == 3


def test_an_exception_in_the_loop_gives_back_too(tmp_path):
    path = tmp_path / "ledger"

    def loop():
        with Ledger(path, ROOMY) as ledger:
            release(ledger, PLAN, 3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert charged(path) == 3


@pytest.mark.parametrize("lease_steps", [1, 64])
def test_releasing_until_refused_is_steps_within(lease_steps, tmp_path):
    budget = Budget(1.5, 1e-6)
    for z, q in ((12.0, 1.0), (0.9, 0.05)):
        plan = Plan(Poisson(q), z, ADD)
        with Ledger(tmp_path / f"ledger{q}", budget, lease_steps=lease_steps) as ledger:
            ledger.begin(plan)
            done = release(ledger, plan, 100_000)
            (run,) = ledger.statement().runs
        assert done == steps_within(budget, z, Poisson(q)) == run.steps
        assert run.epsilon <= budget.epsilon < plan.epsilon(done + 1, budget.delta)


def test_a_run_that_released_nothing_leaves_no_trace(tmp_path):
    with Ledger(tmp_path / "ledger", ROOMY) as ledger:
        ledger.begin(PLAN, name="mine")
        ledger.end()
        assert ledger.statement().runs == ()
        ledger.begin(gaussian_plan(5.0, 3), name="mine")  # the name is free again
        assert release(ledger, gaussian_plan(5.0, 3), 3) == 3


def test_an_id_given_twice_does_not_mix_up_two_runs(tmp_path):
    path = tmp_path / "ledger"
    weak, strong = gaussian_plan(5.0, 3), gaussian_plan(1000.0, 3)
    first, second, third = (Ledger(path, ROOMY) for _ in range(3))
    first.begin(weak, name="mine")
    second.begin(weak, name="mine")
    first.end()  # nothing was released: the row goes, and SQLite may hand out its id again
    third.begin(strong, name="another")
    with pytest.raises(PlanChanged):
        release(second, weak, 1)
    assert charged(path, "another") == 0


@pytest.mark.parametrize("lease_steps", [0, -1])
def test_a_lease_is_at_least_one_step(lease_steps):
    with pytest.raises(ValueError, match="lease_steps"):
        Ledger(budget=ROOMY, lease_steps=lease_steps)


def test_no_two_beginnings_are_one_life(tmp_path):
    """Three processes take turns and give back: a charge comes again, a life does not."""
    plan, lives, charges = gaussian_plan(steps=40), [], []
    first, second = (Ledger(tmp_path / "ledger", ROOMY, lease_steps=8) for _ in range(2))
    first.begin(plan, name="one")
    second.begin(plan, name="one")  # nobody has released anything yet
    lives += [first.life(), second.life()]
    assert release(first, plan, 2) == 2
    first.begin(plan, name="one")
    lives.append(first.life())
    charges.append(first.run_status()[0])
    first.begin(plan, name="one")
    lives.append(first.life())
    charges.append(first.run_status()[0])
    first.begin(gaussian_plan(steps=3), name="two")
    lives.append(first.life())
    first.close()
    second.close()
    assert lives[0] == (1, 1)
    assert charges[0] == charges[1]
    assert len(set(lives)) == len(lives)
