"""A run belongs to one thread: two would take one event of a lease for two steps."""

from __future__ import annotations

import _thread
import threading
import time
from contextlib import suppress

import pytest
import torch
from torch import nn

import tacit
from tacit import Budget, Ledger, Relation
from tacit.accounting import Plan
from tacit.mechanism import PendingRelease

torch.set_num_threads(1)

BUDGET = Budget(20.0, 1e-4)


def plan(steps: int = 10) -> Plan:
    return Plan(tacit.sampling.Poisson(0.1), 2.0, Relation.ADD_OR_REMOVE_ONE, steps)


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
    book = Ledger(tmp_path / "ledger.sqlite", BUDGET)
    book.begin(plan(), name="one")
    (error,) = in_a_thread(lambda: book.begin(plan(5)))
    assert isinstance(error, RuntimeError)
    assert "ledger.end()" in str(error)
    assert book.run_status()[0] == 0
    book.close()


def test_steps_of_one_run_may_come_from_several_threads(tmp_path) -> None:
    book = Ledger(tmp_path / "ledger.sqlite", BUDGET)
    book.begin(plan(), name="one")
    for _ in range(3):
        model, private = gradient()
        assert in_a_thread(lambda m=model, p=private: book.release(p, m)) == []
        assert all(p.grad is not None for p in model.parameters())
    assert book.run_status()[0] == 3


def test_a_run_that_a_thread_left_behind_can_be_ended(tmp_path) -> None:
    book = Ledger(tmp_path / "ledger.sqlite", BUDGET)
    model, private = gradient()
    assert in_a_thread(lambda: book.release(private, model)) == []
    book.close()
    (run,) = Ledger(tmp_path / "ledger.sqlite").statement().runs
    assert run.steps == 1


def test_threads_that_python_did_not_start_leave_a_run_that_can_be_ended(tmp_path) -> None:
    book = Ledger(tmp_path / "ledger.sqlite", BUDGET)
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
    book = Ledger(path and tmp_path / path, BUDGET)
    model, private = gradient()
    book.release(private, model)
    assert in_a_thread(book.statement) == []
    assert in_a_thread(book.end) == []
    (run,) = book.statement().runs
    assert run.steps == 1
    assert in_a_thread(book.close) == []


def test_a_statement_is_read_beside_a_run(tmp_path) -> None:
    """Each has the connection to itself, and no step is lost or counted twice."""
    book = Ledger(tmp_path / "ledger.sqlite", BUDGET, lease_steps=1)
    ended, raised = threading.Event(), []

    def watch() -> None:
        while not ended.is_set():
            book.statement()

    watcher = threading.Thread(target=lambda: raised.extend(in_a_thread(watch)))
    watcher.start()
    for _ in range(20):
        model, private = gradient(20)
        book.release(private, model)
    ended.set()
    watcher.join()
    assert raised == []
    assert book.run_status()[0] == 20


def test_the_last_event_of_a_lease_is_one_step(tmp_path, monkeypatch) -> None:
    """Two threads beside a run whose own has ended: one of them gets it, or each pays."""
    book = Ledger(tmp_path / "ledger.sqlite", BUDGET, lease_steps=2)
    model, private = gradient()
    assert in_a_thread(lambda: book.release(private, model)) == []
    both, draw = threading.Barrier(2, timeout=2), PendingRelease.draw_into
    drawn = []

    def slowly(self, into, *charge) -> None:
        drawn.append(1)
        time.sleep(0.05)
        draw(self, into, *charge)

    monkeypatch.setattr(PendingRelease, "draw_into", slowly)
    given = [gradient() for _ in range(2)]

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
    Ledger(path, BUDGET).close()
    raised = []

    def work(name: str) -> None:
        with Ledger(path) as book:
            book.begin(plan(3), name=name)
            for _ in range(3):
                model, private = gradient(3)
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


def gradient(steps: int = 10):
    records = tacit.Records(
        torch.randn(40, 3), torch.zeros(40, dtype=torch.long), num_classes=2, public_size=40
    )
    sampler = tacit.PoissonSampler(records, expected_batch_size=4, steps=steps)
    model = nn.Linear(3, 2)
    mechanism = tacit.Mechanism(tacit.PerSampleClip(1.0), sampler, 2.0)
    return model, mechanism.privatise(model, tacit.losses.CrossEntropy(), next(iter(sampler)))
