"""A lease is at most one percent of a run; a clean end returns what was not used."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import (
    ADD,
    ROOMY,
    charged,
    gaussian_plan,
    log_rows,
    release,
)

from tacit import Budget, Ledger, steps_within
from tacit.accounting import Plan
from tacit.errors import PlanChanged
from tacit.sampling import Poisson

QUICK = Budget(3.0, 1e-13)  # so small a δ is accounted for by RDP, which takes no time
PLAN = gaussian_plan(1000.0, 2000)


@pytest.mark.parametrize(
    ("steps", "lease_steps", "largest"),
    [
        (60, None, 1),
        (60, 64, 1),
        (199, None, 1),
        (200, None, 2),
        (2000, None, 20),
        (2000, 64, 20),
        (2000, 7, 7),
        (2000, 1, 1),
    ],
)
def test_a_lease_is_one_percent_or_one_step(steps, lease_steps, largest, tmp_path):
    """A plan of 60 steps that is killed after the first has lost nothing; it had lost them all."""
    path, plan = tmp_path / "ledger", gaussian_plan(1000.0, steps)
    ledger = Ledger(path, QUICK, lease_steps=lease_steps)
    ledger.begin(plan, name="mine")
    release(ledger, plan, 1)
    assert charged(path) == largest <= max(1, steps // 100)
    assert ledger.run_status() == (1, steps)
    release(ledger, plan, 2 * largest)
    assert {row["events"] for row in log_rows(path, "charge")} == {largest}
    ledger.close()
    assert charged(path) == 1 + 2 * largest


def test_a_run_without_a_number_of_steps_has_one_percent_of_its_budget(tmp_path):
    plan = gaussian_plan(10.0)
    with Ledger(tmp_path / "ledger", Budget(300.0, 1e-13)) as ledger:
        release(ledger, plan, 1)
        _, limit = ledger.run_status()
        assert charged(tmp_path / "ledger") == limit // 100 > 1


@pytest.mark.parametrize("lease_steps", [1, 5, None])
@pytest.mark.parametrize("steps", [1, 5, 27])
def test_a_lease_is_charged_whole_and_returned(steps, lease_steps, tmp_path):
    path, size = tmp_path / "ledger", lease_steps or 20
    ledger = Ledger(path, QUICK, lease_steps=lease_steps)
    release(ledger, PLAN, steps)
    assert charged(path) == -(-steps // size) * size
    assert ledger.run_status() == (steps, 2000)
    ledger.close()
    assert charged(path) == steps


def test_a_release_within_a_lease_does_not_touch_the_file(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger", QUICK)
    release(ledger, PLAN, 1)

    def never(*args, **settings):
        raise AssertionError("the file was opened")

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", never)
        assert release(ledger, PLAN, 19) == 19
        assert ledger.attempt() == (1, 1)
        with pytest.raises(AssertionError, match="opened"):
            release(ledger, PLAN, 1)
    ledger.close()


@pytest.mark.parametrize("lease_steps", [1, None])
def test_a_crash_keeps_what_was_charged(lease_steps, tmp_path):
    path, plan = tmp_path / "ledger", gaussian_plan(1000.0, 400)
    crashed = Ledger(path, QUICK, lease_steps=lease_steps)
    crashed.begin(plan, name="mine")
    release(crashed, plan, 3)
    held = charged(path)
    with Ledger(path) as again:
        again.begin(plan, name="mine")
        assert again.run_status() == (held, 400)
        assert release(again, plan, 999) == 400 - held
    assert held - 3 < (lease_steps or 4)


def test_returning_happens_once(tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(path, QUICK, lease_steps=10)
    release(ledger, PLAN, 3)
    ledger.end()
    ledger.end()
    ledger.close()
    assert charged(path) == 3


LEAVE = """
import atexit, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored in the background
atexit.register(os._exit, 0)  # runs after the ledger's own, and spares the rest of the way out
sys.path.insert(0, sys.argv[1])
from tiny_run import gaussian_plan, release
from tacit import Budget, Ledger

def main(how):
    ledger, plan = Ledger(how, Budget(3.0, 1e-13)), gaussian_plan(1000.0, 2000)
    release(ledger, plan, 3)
    if how == "exit":
        sys.exit(3)
    if how == "error":
        raise ZeroDivisionError
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fork":
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        os._exit(0)

for how in ("end", "exit", "error", "interrupt", "kill", "fork"):
    if os.fork() == 0:
        main(how)
        sys.exit(0)
    os.wait()
"""


def test_processes_that_left_their_ledgers_open(tmp_path):
    """However Python ends, but for a kill, the lease is returned; a fork returns nothing of it."""
    told = [sys.executable, "-c", LEAVE, str(Path(__file__).parents[1])]
    done = subprocess.run(told, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Traceback") == 2, done.stderr  # the error and Ctrl-C
    found = {file.name: charged(file) for file in tmp_path.iterdir() if "-" not in file.name}
    whole = {"kill": 20, "fork": 20}
    assert found == {"end": 3, "exit": 3, "error": 3, "interrupt": 3, **whole}


def test_an_exception_in_the_loop_gives_back_too(tmp_path):
    path = tmp_path / "ledger"

    def loop():
        with Ledger(path, QUICK) as ledger:
            release(ledger, PLAN, 3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert charged(path) == 3


@pytest.mark.parametrize("lease_steps", [1, None])
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
        ledger.begin(gaussian_plan(steps=40), name="mine")
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
    first.end()  # nothing was released: the run is dropped
    third.begin(strong, name="another")
    with pytest.raises(PlanChanged):
        release(second, weak, 1)
    assert charged(path, "another") == 0


@pytest.mark.parametrize("lease_steps", [0, -1])
def test_a_lease_is_at_least_one_step(lease_steps):
    with pytest.raises(ValueError, match="lease_steps"):
        Ledger(budget=ROOMY, lease_steps=lease_steps)


def test_no_two_attempts_have_one_number(tmp_path):
    """Ledgers take turns and return leases: a number of charges comes again, an attempt never."""
    plan, attempts, charges = gaussian_plan(steps=40), [], []
    first, second = (Ledger(tmp_path / "ledger", ROOMY, lease_steps=8) for _ in range(2))
    first.begin(plan, name="one")
    second.begin(plan, name="one")  # nobody has released anything yet
    attempts += [first.attempt(), second.attempt()]
    assert release(first, plan, 2) == 2
    first.begin(plan, name="one")
    attempts.append(first.attempt())
    charges.append(first.run_status()[0])
    first.begin(plan, name="one")
    attempts.append(first.attempt())
    charges.append(first.run_status()[0])
    first.begin(gaussian_plan(steps=3), name="two")
    attempts.append(first.attempt())
    first.close()
    second.close()
    assert attempts[0] == (1, 1)
    assert charges[0] == charges[1]
    assert len(set(attempts)) == len(attempts)


def test_a_resumed_run_with_a_larger_budget_has_leases_of_its_first_plan(tmp_path):
    """The limit of the run was fixed when it began; a lease is a share of that."""
    plan = gaussian_plan(50.0)
    with Ledger(tmp_path / "ledger", Budget(8.0, 1e-5)) as ledger:
        ledger.begin(plan, name="one", budget=Budget(0.5, 1e-5))
        assert release(ledger, plan) == 1
        limit = ledger.planned_events()
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.begin(plan, name="one")
        assert release(ledger, plan) == 1
        assert charged(tmp_path / "ledger") <= 1 + max(1, limit // 100)
