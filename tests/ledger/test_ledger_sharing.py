"""Forks, processes and threads that share a ledger never overspend together."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import threading
import time
from contextlib import suppress

import pytest
from forked import Forked
from ledger_children import CLEAN, race
from tiny_run import ADD, ROOMY, charged, gaussian_plan, gradient, one_weight, release

from tacit import Budget, Ledger
from tacit.accounting import Plan
from tacit.mechanism import PendingRelease
from tacit.sampling import Poisson

# Fork copies memory, leases included; it must not copy what they allow.


QUICK = Budget(3.0, 1e-13)  # so small a δ is accounted for by RDP, which takes no time
PLAN = gaussian_plan(1000.0, 2000)  # a lease is 20 steps


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


def half_used(path, lease_steps=20):
    ledger = Ledger(path, QUICK, lease_steps=lease_steps)
    ledger.begin(PLAN, name="mine")
    assert release(ledger, PLAN, 5) == 5
    return ledger


BEFORE = {
    "nothing": lambda ledger: None,
    "statement": lambda ledger: ledger.statement(),
    "run_status": lambda ledger: ledger.run_status(),
}


@pytest.mark.parametrize("first", BEFORE.values(), ids=list(BEFORE))
def test_a_child_does_not_spend_its_parent_s_lease(first, path):
    ledger = half_used(path)

    def child():
        first(ledger)
        return release(ledger, PLAN, 60)

    how, by_child = Forked(child).result()
    assert how == "done", by_child
    assert by_child == 60
    by_parent = release(ledger, PLAN, 30)
    assert by_parent == 30
    assert charged(path) >= 5 + by_child + by_parent


def test_a_child_is_noticed_whatever_its_process_number(path, monkeypatch):
    """In a namespace of its own a child may have its parent's number."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    ledger = half_used(path)
    assert Forked(lambda: release(ledger, PLAN, 15)).result() == ("done", 15)
    assert release(ledger, PLAN, 15) == 15
    assert charged(path) >= 35


@pytest.mark.parametrize("first", BEFORE.values(), ids=list(BEFORE))
@pytest.mark.parametrize("leave", ["end", "close"])
def test_a_child_does_not_give_back_its_parent_s_lease(leave, first, path):
    ledger = half_used(path)
    held = charged(path)

    def child():
        first(ledger)
        getattr(ledger, leave)()

    assert Forked(child).result() == ("done", None)
    assert charged(path) == held
    assert release(ledger, PLAN, 15) == 15  # the parent's lease still holds
    assert charged(path) >= 20


@pytest.mark.parametrize("opens_it_again", [False, True])
def test_the_parent_may_end_the_run_while_the_child_goes_on(path, opens_it_again):
    """What the child releases afterwards must still reach the file.

    To open the file again, and leave the inherited ledger alone, is the documented way.
    """
    ledger = half_used(path, lease_steps=1)
    told, tell = os.pipe()

    def child():
        own = ledger
        if opens_it_again:
            own = Ledger(path, lease_steps=1)
            own.begin(PLAN, name="mine")
        before = release(own, PLAN, 3)
        os.read(told, 1)
        return before + release(own, PLAN, 3)

    forked = Forked(child)
    while charged(path) < 8:
        pass
    ledger.close()
    os.write(tell, b"!")
    how, by_child = forked.result()
    released = 5 + (by_child if how == "done" else 3)
    assert charged(path) >= released


def test_a_run_dropped_by_the_parent_is_not_another_run_to_the_child(path):
    weak, strong = gaussian_plan(5.0, 3), gaussian_plan(1000.0, 3)
    ledger = Ledger(path, QUICK)
    ledger.begin(weak)
    told, tell = os.pipe()

    def child():
        os.read(told, 1)
        return release(ledger, weak, 1)

    forked = Forked(child)
    ledger.begin(strong, name="another")
    os.write(tell, b"!")
    how, _ = forked.result()
    assert how == "raised" or charged(path, "another") == 0


def test_a_ledger_in_memory_is_not_for_two():
    ledger = Ledger(budget=QUICK)
    release(ledger, PLAN, 1)
    how, why = Forked(lambda: release(ledger, PLAN, 1)).result()
    assert how == "raised"
    assert "memory" in why


# Many processes on one file.


TIGHT = gaussian_plan(10.0)
LIMIT = TIGHT.steps_within(ROOMY)


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
    statement = Ledger(tmp_path / "ledger").statement()
    assert statement.epsilon <= ROOMY.epsilon
    assert sum(run.steps for run in statement.runs) == sum(steps for _, steps in found)
    assert sum(steps for _, steps in found) < 100  # the budget did bind
    assert not any(run.exclusive for run in statement.runs)


def test_opening_a_fresh_file_together_is_no_accident(tmp_path):
    jobs = [(f"run {i}", gaussian_plan(50.0, 2), 2) for i in range(4)]
    for i in range(12):
        race(CLEAN, tmp_path / f"ledger {i}", Budget(3.0, 1e-13), jobs, fresh=True)
        assert len(Ledger(tmp_path / f"ledger {i}").statement().runs) == 4


# A run belongs to one thread; its steps may come from several.


LARGE = Budget(20.0, 1e-4)


def plan(steps: int = 10) -> Plan:
    return Plan(Poisson(0.1), 2.0, ADD, steps)


def pending(steps: int = 10):
    model = one_weight()
    return model, gradient(plan(steps), model)


def in_a_thread(work) -> list[BaseException]:
    raised: list[BaseException] = []

    def caught() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    return raised


def test_another_thread_does_not_begin_while_the_run_goes_on(tmp_path) -> None:
    """It would end the first one's run, which would then be told the other's count."""
    book = Ledger(tmp_path / "ledger.sqlite", LARGE)
    book.begin(plan(), name="one")
    (error,) = in_a_thread(lambda: book.begin(plan(5)))
    assert isinstance(error, RuntimeError)
    assert "ledger.end()" in str(error)
    assert book.run_status()[0] == 0
    book.close()


def test_steps_of_one_run_may_come_from_several_threads(tmp_path) -> None:
    book = Ledger(tmp_path / "ledger.sqlite", LARGE)
    book.begin(plan(), name="one")
    for _ in range(3):
        model, private = pending()
        assert in_a_thread(lambda m=model, p=private: book.release(p, m)) == []
        assert all(p.grad is not None for p in model.parameters())
    assert book.run_status()[0] == 3


def test_a_run_that_a_thread_left_behind_can_be_ended(tmp_path) -> None:
    book = Ledger(tmp_path / "ledger.sqlite", LARGE)
    model, private = pending()
    assert in_a_thread(lambda: book.release(private, model)) == []
    book.close()
    (run,) = Ledger(tmp_path / "ledger.sqlite").statement().runs
    assert run.steps == 1


def test_threads_that_python_did_not_start_leave_a_run_that_can_be_ended(tmp_path) -> None:
    book = Ledger(tmp_path / "ledger.sqlite", LARGE)
    done = threading.Lock()
    done.acquire()

    def work() -> None:
        book.begin(plan(), name="one")
        threading.current_thread()  # is made up, and says for ever that it lives
        done.release()

    _thread.start_new_thread(work, ())
    with done:
        time.sleep(0.2)
    book.begin(plan(5), name="two")
    book.close()


@pytest.mark.parametrize("path", [None, "ledger.sqlite"])
def test_any_thread_may_look_and_end(path, tmp_path) -> None:
    book = Ledger(path and tmp_path / path, LARGE)
    model, private = pending()
    book.release(private, model)
    assert in_a_thread(book.statement) == []
    assert in_a_thread(book.end) == []
    (run,) = book.statement().runs
    assert run.steps == 1
    assert in_a_thread(book.close) == []


def test_a_statement_is_read_beside_a_run(tmp_path) -> None:
    """Each has the connection to itself, and no step is lost or counted twice."""
    book = Ledger(tmp_path / "ledger.sqlite", LARGE, lease_steps=1)
    ended, raised = threading.Event(), []

    def watch() -> None:
        while not ended.is_set():
            book.statement()

    watcher = threading.Thread(target=lambda: raised.extend(in_a_thread(watch)))
    watcher.start()
    for _ in range(20):
        model, private = pending(20)
        book.release(private, model)
    ended.set()
    watcher.join()
    assert raised == []
    assert book.run_status()[0] == 20


def test_the_last_event_of_a_lease_is_one_step(tmp_path, monkeypatch) -> None:
    """Two threads beside a run whose own has ended: one of them gets it, or each pays."""
    book = Ledger(tmp_path / "ledger.sqlite", LARGE, lease_steps=2)
    model, private = pending()
    assert in_a_thread(lambda: book.release(private, model)) == []
    both, draw = threading.Barrier(2, timeout=2), PendingRelease.draw_into
    drawn = []

    def slowly(self, into, *charge) -> None:
        drawn.append(1)
        time.sleep(0.05)
        draw(self, into, *charge)

    monkeypatch.setattr(PendingRelease, "draw_into", slowly)
    given = [pending() for _ in range(2)]

    def work(model, private) -> None:
        both.wait()
        with suppress(RuntimeError):
            book.release(private, model)

    threads = [threading.Thread(target=work, args=pair) for pair in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    book.end()
    (run,) = book.statement().runs
    assert run.steps == 1 + len(drawn)


def test_threads_with_ledgers_of_their_own_share_the_file(tmp_path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path, LARGE).close()
    raised = []

    def work(name: str) -> None:
        with Ledger(path) as book:
            book.begin(plan(3), name=name)
            for _ in range(3):
                model, private = pending(3)
                book.release(private, model)

    threads = [
        threading.Thread(target=lambda n=n: raised.extend(in_a_thread(lambda: work(n))))
        for n in ("one", "two", "three")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert sorted(run.steps for run in Ledger(path).statement().runs) == [3, 3, 3]
