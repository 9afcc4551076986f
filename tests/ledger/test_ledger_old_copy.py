"""An old copy that is put back would forget charges: it is noticed, by process, head or anchor."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from ledger_children import CLEAN, race
from tiny_run import gaussian_plan, release

from tacit import Budget, Ledger
from tacit.errors import LedgerDamaged
from tacit.ledger.statement import verify_file

BUDGET = Budget(3.0, 1e-13)
PLAN = gaussian_plan(1000.0, 50)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


@pytest.fixture
def anchor(tmp_path):
    return tmp_path / "elsewhere" / "anchor.json"


def used(path, steps, name="one", **more):
    with Ledger(path, BUDGET, **more) as ledger:
        ledger.begin(PLAN, name=name)
        assert release(ledger, PLAN, steps) == steps


def copy_of(path):
    return shutil.copyfile(path, path.with_name("copy"))


def put_back(copy, path):
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    os.replace(copy, path)


@pytest.mark.parametrize("how", ["release", "statement", "run_status", "end", "verify"])
def test_while_a_process_runs(how, path):
    used(path, 3)
    copy = copy_of(path)
    ledger = Ledger(path)
    ledger.begin(PLAN, name="one")
    assert release(ledger, PLAN, 2) == 2
    put_back(copy, path)
    act = {"release": lambda: release(ledger, PLAN, 1)}.get(how) or getattr(ledger, how)
    with pytest.raises(LedgerDamaged, match="put in its place"):
        act()


def test_a_copy_that_went_another_way_while_a_process_runs(path):
    """It has as many rows, and more; but not those that this process has written."""
    used(path, 3)
    copy = copy_of(path)
    used(copy, 9, name="another")
    ledger = Ledger(path)
    ledger.begin(PLAN, name="one")
    release(ledger, PLAN, 1)
    put_back(copy, path)
    with pytest.raises(LedgerDamaged, match="put in its place"):
        release(ledger, PLAN, 1)


def test_rows_that_are_cut_off_or_added_while_a_process_runs(path):
    import sqlite3

    used(path, 3)
    ledger = Ledger(path)
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM log WHERE seq = 4")
    db.close()
    with pytest.raises(LedgerDamaged, match="changed outside"):
        ledger.statement()


def test_an_old_copy_passes_without_an_anchor_and_not_with_one(path, anchor):
    used(path, 3, anchor=anchor)
    copy = copy_of(path)
    used(path, 4, anchor=anchor)
    put_back(copy, path)
    Ledger(path).close()  # nothing in the file says that it is old
    with pytest.raises(LedgerDamaged, match="older copy"):
        Ledger(path, anchor=anchor)
    with pytest.raises(LedgerDamaged, match="older copy"):
        verify_file(path, anchor=anchor)


def test_a_copy_that_went_another_way_is_refused(path, anchor):
    used(path, 3, anchor=anchor)
    copy = copy_of(path)
    used(path, 4, anchor=anchor)
    used(copy, 20, name="another")
    put_back(copy, path)
    with pytest.raises(LedgerDamaged, match="older copy"):
        Ledger(path, anchor=anchor)


def test_another_ledger_is_refused(path, anchor, tmp_path):
    used(path, 3, anchor=anchor)
    Ledger(tmp_path / "other", Budget(2.0, 1e-13)).close()
    with pytest.raises(LedgerDamaged, match="another"):
        Ledger(tmp_path / "other", anchor=anchor)


def test_a_deleted_ledger_is_not_started_again(path, anchor):
    used(path, 3, anchor=anchor)
    path.unlink()
    with pytest.raises(LedgerDamaged, match="anchor"):
        Ledger(path, BUDGET, anchor=anchor)
    assert not path.exists()


def test_the_anchor_follows_every_commit(path, anchor):
    with Ledger(path, BUDGET, anchor=anchor, lease_steps=1) as ledger:
        for _ in range(3):
            release(ledger, PLAN, 1)
            stored = json.loads(anchor.read_text())
            assert stored["digest"] == ledger.head
            assert stored["ledger"] == ledger.identity
    verify_file(path, anchor=anchor)
    assert [file.name for file in anchor.parent.iterdir()] == ["anchor.json"]


def test_a_crash_between_commit_and_anchor_leaves_a_ledger_that_can_be_used(
    path, anchor, monkeypatch
):
    used(path, 3, anchor=anchor)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tacit.ledger.store.os.replace", die)
        ledger = Ledger(path, anchor=anchor)
        with pytest.raises(KeyboardInterrupt):
            ledger.begin(PLAN, name="one")
    behind = json.loads(anchor.read_text())
    with Ledger(path, anchor=anchor) as ledger:
        assert behind["digest"] != ledger.head
        ledger.begin(PLAN, name="one")
        assert release(ledger, PLAN, 2) == 2
    assert json.loads(anchor.read_text())["digest"] == Ledger(path).head


def test_an_anchor_that_cannot_be_written_releases_nothing(path, anchor):
    ledger = Ledger(path, BUDGET, anchor=anchor)
    ledger.begin(PLAN, name="one")
    shutil.rmtree(anchor.parent)
    anchor.parent.write_text("in the way")
    with pytest.raises(OSError, match="elsewhere"):
        release(ledger, PLAN, 1)
    assert Ledger(path).statement().runs[0].steps == 1  # charged, and no noise was drawn


def test_an_anchor_for_a_ledger_that_has_been_used_is_asked_for(path, anchor):
    """A mistyped path must not start a new anchor in silence; the remedy works."""
    used(path, 3)
    with pytest.raises(LedgerDamaged, match="tacit ledger anchor"):
        Ledger(path, anchor=anchor)
    with Ledger(path) as ledger:
        ledger.write_anchor(anchor)
    used(path, 2, anchor=anchor)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"ledger": 1, "seq": 2, "digest": "a"}', "\xff", "[" * 10_000]
)
def test_a_broken_anchor_is_named(text, path, anchor):
    used(path, 3, anchor=anchor)
    anchor.write_bytes(text.encode("latin-1"))
    with pytest.raises(LedgerDamaged, match="not the anchor"):
        Ledger(path, anchor=anchor)


def test_processes_that_share_an_anchor(path, anchor):
    Ledger(path, BUDGET, anchor=anchor).close()
    race(CLEAN, path, BUDGET, [(f"run {i}", PLAN, 4) for i in range(3)], anchor=anchor)
    verify_file(path, anchor=anchor)
    assert json.loads(anchor.read_text())["digest"] == Ledger(path).head


def test_the_printed_head_finds_it(path):
    used(path, 3)
    copy = copy_of(path)
    used(path, 2)
    with Ledger(path) as ledger:
        head = ledger.head
        ledger.begin(PLAN, name="another")
        ledger.verify(head)
        ledger.verify(f" {head.upper()} ")
    verify_file(path, head)
    for wrong in (head[:-1], "", "0" * 64):
        with pytest.raises(LedgerDamaged, match="no row"):
            verify_file(path, wrong)
    with pytest.raises(LedgerDamaged, match="older copy"):
        verify_file(copy, head)


def test_the_head_is_that_of_all_processes(path):
    with Ledger(path, BUDGET) as ledger, Ledger(path) as other:
        other.begin(PLAN, name="one")
        assert ledger.head == other.head


def test_the_identity_is_that_of_the_budget(tmp_path):
    """A seed with identity, run and attempt repeats a run on a fresh ledger of the same budget."""
    first, second = Ledger(tmp_path / "a", Budget(3, 1e-5)), Ledger(None, Budget(3.0, 1e-5))
    release(first, PLAN, 2)
    assert first.identity == second.identity == Ledger(tmp_path / "a").identity
    assert first.identity != Ledger(None, Budget(3.0, 1e-6)).identity
    assert len(first.identity) == 64
    assert first.head != second.head
