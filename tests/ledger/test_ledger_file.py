"""The file is the ledger: it outlives processes, and what is no ledger is never taken for one."""

from __future__ import annotations

import os
import resource
import sqlite3
import tempfile

import dp_accounting as dpa
import pytest
from forked import Forked
from tiny_run import ADD, REPLACE, ROOMY, charged, gaussian_plan, gradient, one_weight, release

from tacit import Budget, Ledger
from tacit.accounting import Plan
from tacit.errors import BudgetExceeded, LedgerDamaged, PlanChanged
from tacit.ledger.statement import read_statement
from tacit.randomness import Stream
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


# What is no ledger is neither taken for one nor written into.


LONG_PLAN = gaussian_plan(50.0, 500)


def foreign(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE people (name TEXT)")
        db.execute("INSERT INTO people VALUES ('Ada')")
    db.close()


def other_budget(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE budget (month TEXT, pounds REAL)")
    db.close()


def text(path):
    path.write_text("month,pounds\n" * 100)


def short_text(path):
    path.write_text("a")


def truncated(path):
    with Ledger(path, ROOMY) as ledger:
        release(ledger, LONG_PLAN, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def cut_in_the_header(path):
    with Ledger(path, ROOMY) as ledger:
        release(ledger, LONG_PLAN, 2)
    path.write_bytes(path.read_bytes()[:60])


NO_LEDGERS = [foreign, other_budget, text, short_text, truncated, cut_in_the_header]


@pytest.mark.parametrize("make", NO_LEDGERS)
@pytest.mark.parametrize("budget", [ROOMY, None])
def test_what_is_no_ledger_is_refused_and_left_as_it_was(make, budget, tmp_path):
    path = tmp_path / "file"
    make(path)
    before = path.read_bytes()
    for attempt in (lambda: Ledger(path, budget), lambda: read_statement(path)):
        with pytest.raises(LedgerDamaged, match="no ledger") as refused:
            attempt()
        assert str(path) in str(refused.value)
        assert path.read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("budget", [ROOMY, None])
def test_an_empty_file_is_not_a_new_ledger(budget, tmp_path):
    """A ledger that was emptied must not start again from zero."""
    path = tmp_path / "ledger"
    with Ledger(path, ROOMY) as ledger:
        release(ledger, LONG_PLAN, 2)
    path.write_bytes(b"")
    for attempt in (lambda: Ledger(path, budget), lambda: read_statement(path)):
        with pytest.raises(LedgerDamaged, match="empty file"):
            attempt()
    assert path.read_bytes() == b""
    path.unlink()  # the remedy, where no ledger was there
    with Ledger(path, ROOMY) as ledger:
        assert release(ledger, LONG_PLAN, 2) == 2


def test_reading_changes_nothing_and_says_what_the_ledger_says(tmp_path):
    path = tmp_path / "ledger"
    with Ledger(path, ROOMY) as ledger:
        release(ledger, LONG_PLAN, 3)
        ledger.end()
        said = ledger.statement()
    before, when = path.read_bytes(), path.stat().st_mtime_ns
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert read_statement(path) == said
    finally:
        tmp_path.chmod(0o755)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, when)
    assert [file.name for file in tmp_path.iterdir()] == ["ledger"]


def test_what_is_still_in_the_log_is_read(tmp_path):
    path = tmp_path / "ledger"
    Ledger(path, ROOMY).close()
    other = sqlite3.connect(path)
    assert other.execute("SELECT count(*) FROM log").fetchone() == (1,)  # keeps the log alive
    with Ledger(path) as ledger:
        release(ledger, LONG_PLAN, 3)
    assert (tmp_path / "ledger-wal").stat().st_size > 0
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert read_statement(path).runs[0].steps == 3
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    other.close()


# A charge that cannot be written is an error, and an error releases nothing.


def fill_up(path):
    """In a process that may not let any file grow: a full disk, as SQLite sees it."""
    draws = []
    drawn = Stream.flat_normals
    Stream.flat_normals = lambda self, *args: draws.append(1) or drawn(self, *args)
    ledger = Ledger(path, ROOMY, lease_steps=1)
    assert release(ledger, LONG_PLAN, 3) == 3
    largest = max(
        os.path.getsize(f"{path}{end}") for end in ("", "-wal") if os.path.exists(f"{path}{end}")
    )
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, hard))
    model, error = one_weight(), None
    for _ in range(200):
        model.weight.grad = None
        try:
            ledger.release(gradient(LONG_PLAN, model), into=model)
        except sqlite3.Error as caught:
            error = str(caught)
            break
    untouched = model.weight.grad is None
    at_error = len(draws)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        release(ledger, LONG_PLAN, 1)
        went_on = True
    except sqlite3.Error as caught:
        went_on = str(caught)
    ledger.close()
    return error, untouched, at_error, len(draws), went_on


def test_a_full_disk_releases_nothing_and_passes(tmp_path):
    how, answer = Forked(lambda: fill_up(tmp_path / "ledger")).result()
    assert how == "done", answer
    error, untouched, _, draws, went_on = answer
    assert error is not None
    assert untouched
    assert charged(tmp_path / "ledger") >= draws
    assert went_on is True


def test_a_file_that_became_read_only_releases_nothing(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger", ROOMY, lease_steps=1)
    model = one_weight()
    ledger.release(gradient(LONG_PLAN, model), into=model)
    before = model.weight.grad.clone()
    connect = sqlite3.connect

    def read_only(*args, **settings):
        db = connect(*args, **settings)
        db.execute("PRAGMA query_only = ON")
        return db

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", read_only)
        for _ in range(2):
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                ledger.release(gradient(LONG_PLAN, model), into=model)
    assert model.weight.grad.equal(before)
    assert release(ledger, LONG_PLAN, 1) == 1
    assert charged(tmp_path / "ledger") == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root")
def test_a_read_only_file_cannot_be_released_from():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ledger")
        with Ledger(path, ROOMY) as ledger:
            release(ledger, LONG_PLAN, 2)
        os.chmod(folder, 0o555)
        os.chmod(path, 0o444)

        def as_nobody():
            os.setuid(65534)
            with Ledger(path) as ledger:
                return release(ledger, LONG_PLAN, 1)

        how, _ = Forked(as_nobody).result()
        assert how == "raised"
        assert charged(path) == 2


def test_a_busy_ledger_is_waited_for_or_refused(tmp_path, monkeypatch):
    """Somebody else holds the write lock for ever."""
    ledger = Ledger(tmp_path / "ledger", ROOMY, lease_steps=1)
    release(ledger, LONG_PLAN, 1)
    monkeypatch.setattr("tacit.ledger.store.WAIT_SECONDS", 0.05)
    other = sqlite3.connect(tmp_path / "ledger", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        release(ledger, LONG_PLAN, 1)
    other.execute("ROLLBACK")
    assert release(ledger, LONG_PLAN, 1) == 1
    other.close()
    assert charged(tmp_path / "ledger") == 2
