"""What is no ledger is neither taken for one nor written into."""

import sqlite3

import pytest
from tiny_run import ROOMY, gaussian_plan, release

from tacit import Ledger
from tacit.errors import LedgerDamaged
from tacit.ledger.statement import read_statement

PLAN = gaussian_plan(50.0, 500)


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
        release(ledger, PLAN, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def cut_in_the_header(path):
    with Ledger(path, ROOMY) as ledger:
        release(ledger, PLAN, 2)
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
        release(ledger, PLAN, 2)
    path.write_bytes(b"")
    for attempt in (lambda: Ledger(path, budget), lambda: read_statement(path)):
        with pytest.raises(LedgerDamaged, match="empty file"):
            attempt()
    assert path.read_bytes() == b""
    path.unlink()  # the remedy, where no ledger was there
    with Ledger(path, ROOMY) as ledger:
        assert release(ledger, PLAN, 2) == 2


def test_reading_changes_nothing_and_says_what_the_ledger_says(tmp_path):
    path = tmp_path / "ledger"
    with Ledger(path, ROOMY) as ledger:
        release(ledger, PLAN, 3)
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
        release(ledger, PLAN, 3)
    assert (tmp_path / "ledger-wal").stat().st_size > 0
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert read_statement(path).runs[0].steps == 3
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    other.close()
