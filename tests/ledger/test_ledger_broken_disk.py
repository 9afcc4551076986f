"""A charge that cannot be written is an error, and an error releases nothing."""

import os
import resource
import sqlite3
import tempfile

import pytest
from forked import Forked
from tiny_run import ROOMY, charged, gaussian_plan, gradient, one_weight, release

from tacit import Ledger
from tacit.randomness import Stream

PLAN = gaussian_plan(50.0, 500)


def fill_up(path):
    """In a process that may not let any file grow: a full disk, as SQLite sees it."""
    draws = []
    drawn = Stream.normals
    Stream.normals = lambda self, *args: draws.append(1) or drawn(self, *args)
    ledger = Ledger(path, ROOMY, lease_steps=1)
    assert release(ledger, PLAN, 3) == 3
    largest = max(
        os.path.getsize(f"{path}{end}") for end in ("", "-wal") if os.path.exists(f"{path}{end}")
    )
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, hard))
    model, error = one_weight(), None
    for _ in range(200):
        model.weight.grad = None
        try:
            ledger.release(gradient(PLAN, model), into=model)
        except sqlite3.Error as caught:
            error = str(caught)
            break
    untouched = model.weight.grad is None
    at_error = len(draws)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        release(ledger, PLAN, 1)
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
    ledger.release(gradient(PLAN, model), into=model)
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
                ledger.release(gradient(PLAN, model), into=model)
    assert model.weight.grad.equal(before)
    assert release(ledger, PLAN, 1) == 1
    assert charged(tmp_path / "ledger") == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root")
def test_a_read_only_file_cannot_be_released_from():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ledger")
        with Ledger(path, ROOMY) as ledger:
            release(ledger, PLAN, 2)
        os.chmod(folder, 0o555)
        os.chmod(path, 0o444)

        def as_nobody():
            os.setuid(65534)
            with Ledger(path) as ledger:
                return release(ledger, PLAN, 1)

        how, _ = Forked(as_nobody).result()
        assert how == "raised"
        assert charged(path) == 2


def test_a_busy_ledger_is_waited_for_or_refused(tmp_path, monkeypatch):
    """Somebody else holds the write lock for ever."""
    ledger = Ledger(tmp_path / "ledger", ROOMY, lease_steps=1)
    release(ledger, PLAN, 1)
    monkeypatch.setattr("tacit.ledger.store.WAIT_SECONDS", 0.05)
    other = sqlite3.connect(tmp_path / "ledger", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        release(ledger, PLAN, 1)
    other.execute("ROLLBACK")
    assert release(ledger, PLAN, 1) == 1
    other.close()
    assert charged(tmp_path / "ledger") == 2
