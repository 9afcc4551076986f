"""A ledger that was edited, cut or overwritten is refused by one typed error with a remedy."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing

import dp_accounting as dpa
import pytest
from tiny_run import gaussian_plan, gradient, one_weight, release

from tacit import Budget, Ledger
from tacit.accounting.rdp import epsilon_at
from tacit.errors import BudgetExceeded, LedgerDamaged
from tacit.ledger.statement import read_statement
from tacit.ledger.store import START, Head, row_digest

BUDGET = Budget(3.0, 1e-13)  # so small a δ is accounted for by RDP, which takes no time
PLAN = gaussian_plan(100.0, 500, prelude=(dpa.GaussianDpEvent(500.0),))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A ledger with rows of every kind."""
    path = tmp_path_factory.mktemp("pristine") / "ledger"
    with Ledger(path, BUDGET, lease_steps=5) as ledger:
        ledger.begin(PLAN, name="one")
        assert release(ledger, PLAN, 7) == 7
        ledger.name_claim(ledger.claim_next(dpa.GaussianDpEvent(500.0), "a mean"), "a mean 12ab")
        ledger.begin(gaussian_plan(90.0, 400), name="unused")
        ledger.begin(gaussian_plan(80.0, 300), name="two")
        private = gradient(gaussian_plan(80.0, 300), model := one_weight())
        ledger.release(private, into=model)
    return path


@pytest.fixture
def path(pristine, tmp_path):
    target = tmp_path / "ledger"
    target.write_bytes(pristine.read_bytes())
    return target


def execute(path, *statements):
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA synchronous = OFF")
    for statement in statements:
        db.execute(*statement) if isinstance(statement, tuple) else db.execute(statement)
    db.close()


def rows_of(path):
    db = sqlite3.connect(path)
    rows = db.execute("SELECT seq, kind, body, digest FROM log ORDER BY seq").fetchall()
    db.close()
    return rows


def rewrite(path, change):
    """Change the rows, and compute a whole chain anew: what a patient forger does."""
    rows = change([(kind, json.loads(body)) for _, kind, body, _ in rows_of(path)])
    tip, inserts = START, []
    for kind, body in rows:
        text = body if isinstance(body, str) else json.dumps(body)
        tip = Head(tip.seq + 1, row_digest(tip, kind, text))
        inserts.append(("INSERT INTO log VALUES (?, ?, ?, ?)", (tip.seq, kind, text, tip.digest)))
    head = ("UPDATE head SET seq = ?, digest = ?", (tip.seq, tip.digest))
    execute(path, "DELETE FROM log", *inserts, head)


def refused(path):
    for attempt in (lambda: Ledger(path), lambda: read_statement(path)):
        with pytest.raises(LedgerDamaged) as found:
            attempt()
        assert any(word in str(found.value) for word in ("restore", "give the file", "start a new"))
    return str(found.value)


def test_the_rows_of_the_format_are_all_there(path):
    kinds = {kind for _, kind, _, _ in rows_of(path)}
    assert kinds == {"ledger", "run", "attempt", "charge", "return", "claim", "name", "drop"}
    with Ledger(path) as ledger:
        assert [run.steps for run in ledger.statement().runs] == [7, 1]


@pytest.mark.parametrize("column", ["kind", "body", "digest"])
def test_an_edited_row(column, path):
    """Every row, in every column, by one character."""
    whole, rows = path.read_bytes(), rows_of(path)
    for seq, *_ in rows:
        path.write_bytes(whole)
        last = f"substr({column}, 1, length({column}) - 1)"
        other = f"CASE WHEN {column} LIKE '%a' THEN 'b' ELSE 'a' END"
        execute(path, f"UPDATE log SET {column} = {last} || ({other}) WHERE seq = {seq}")
        assert f"row {seq} " in refused(path)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM log WHERE seq = 1",
        "DELETE FROM log WHERE seq = 5",
        "DELETE FROM log WHERE seq = (SELECT max(seq) FROM log)",
        "DELETE FROM log WHERE kind = 'charge'",
        "DELETE FROM log",
        "INSERT INTO log SELECT max(seq) + 1, kind, body, digest FROM log",
        "INSERT INTO log SELECT 0, kind, body, digest FROM log WHERE seq = 3",
        "UPDATE log SET seq = -seq WHERE seq = 4",
        "UPDATE log SET body = CAST(x'ff00fe' AS TEXT) WHERE seq = 4",
        "UPDATE log SET body = 7 WHERE seq = 4",
        "UPDATE log SET body = '[]' WHERE seq = 4",
        "UPDATE head SET seq = seq - 1",
        "UPDATE head SET digest = 'ab'",
        "UPDATE head SET digest = x'ff'",
        "UPDATE head SET seq = 'many'",
        "DELETE FROM head",
        "DROP TABLE head",
        "DROP TABLE log",
        "CREATE TABLE more (a)",
        "CREATE TRIGGER silent AFTER INSERT ON log BEGIN DELETE FROM log WHERE seq > 3; END",
        "CREATE INDEX kinds ON log (kind)",
    ],
)
def test_a_changed_table(statement, path):
    execute(path, statement)
    refused(path)


def test_two_rows_that_change_places(path):
    execute(
        path,
        "UPDATE log SET seq = -1 WHERE seq = 3",
        "UPDATE log SET seq = 3 WHERE seq = 4",
        "UPDATE log SET seq = 4 WHERE seq = -1",
    )
    refused(path)


def test_the_last_charge_and_the_head_put_back_together_are_an_older_ledger(path):
    """Only a head that was kept elsewhere tells it from the real one; then it does."""
    with Ledger(path) as ledger:
        head = ledger.head
    *_, before, last = rows_of(path)
    execute(
        path,
        f"DELETE FROM log WHERE seq = {last[0]}",
        ("UPDATE head SET seq = ?, digest = ?", (before[0], before[3])),
    )
    with Ledger(path) as ledger:
        with pytest.raises(LedgerDamaged, match="older copy"):
            ledger.verify(head)
        ledger.verify(before[3])


def added(kind, body):
    return lambda rows: [*rows, (kind, body)]


def charged(**changes):
    return added("charge", {"run": 1, "attempt": 1, "events": 1} | changes)


FORGED = {
    "unknown kind": added("refund", {"run": 1, "events": 5}),
    "two budgets": lambda rows: [*rows, rows[0]],
    "no budget": lambda rows: rows[1:],
    "other format": lambda rows: [("ledger", rows[0][1] | {"format": 3}), *rows[1:]],
    "no JSON": added("charge", '{"run": 1, '),
    "deep JSON": added("charge", '{"run": ' + "[" * 100_000),
    "endless number": added("charge", '{"run": 1' + "0" * 5000 + "}"),
    "no object": added("charge", "[1, 2]"),
    "nothing said": added("charge", {}),
    "more said": added("drop", {"run": 2, "why": "because"}),
    "unknown run": charged(run=9),
    "unknown attempt": charged(attempt=9),
    "negative charge": charged(events=-5),
    "no whole charge": charged(events=0.5),
    "charge of NaN": charged(events=float("nan")),
    "true charge": charged(events=True),
    "huge charge": charged(events=10**30),
    "returned too much": added("return", {"run": 1, "attempt": 1, "events": 8}),
    "charged run dropped": added("drop", {"run": 1}),
    "key of a number": added("claim", {"run": 1, "claim": "x", "noise_multiplier": 1, "key": 7}),
    "claim of NaN": added("claim", {"run": 1, "claim": "x", "noise_multiplier": float("nan")}),
}
PLANS = {
    "noise of NaN": {"noise_multiplier": float("nan")},
    "negative noise": {"noise_multiplier": -1.0},
    "noise as text": {"noise_multiplier": "5"},
    "noise too large": {"noise_multiplier": 10**400},
    "huge number of steps": {"steps": 10**60},
    "steps as text": {"steps": "500"},
    "unknown unit": {"unit": "person"},
    "other relation": {"relation": "replace-one"},
    "unknown relation": {"relation": "none"},
    "rate above one": {"scheme": {"kind": "Poisson", "rate": 3.0}},
    "rate of NaN": {"scheme": {"kind": "Poisson", "rate": float("nan")}},
    "rate as text": {"scheme": {"kind": "Poisson", "rate": "half"}},
    "scheme without a name": {"scheme": {"rate": 0.5}},
    "scheme of another kind": {"scheme": [1]},
    "scheme of no kind": {"scheme": {"kind": None}},
    "strange prelude": {"prelude": ["a"]},
    "prelude of NaN": {"prelude": [float("nan")]},
}


def with_plan(changes):
    def change(rows):
        at = next(i for i, (kind, _) in enumerate(rows) if kind == "run")
        plan = rows[at][1]["plan"] | changes
        return [*rows[:at], ("run", rows[at][1] | {"plan": plan}), *rows[at + 1 :]]

    return change


@pytest.mark.parametrize(
    "change", [*FORGED.values(), *map(with_plan, PLANS.values())], ids=[*FORGED, *PLANS]
)
def test_a_row_that_says_what_no_ledger_says(change, path):
    """Even under a chain that was computed anew."""
    rewrite(path, change)
    refused(path)


def test_rewriting_nothing_is_a_ledger(path):
    rewrite(path, list)
    Ledger(path).close()


@pytest.mark.parametrize("column", ["event_limit", "limit", "exclusive", "cost", "order"])
def test_no_stored_limit_is_believed(column, path):
    """The attack of an edited limit: there is none to edit, and one that is added is refused."""

    def change(rows):
        return [(kind, {**body, column: 10**8} if kind == "run" else body) for kind, body in rows]

    rewrite(path, change)
    refused(path)


def test_a_run_stops_where_its_plan_and_budget_say(tmp_path):
    """Whatever is in the file: charges that a forger takes out leave the limit where it is."""
    plan, path = gaussian_plan(10.0), tmp_path / "ledger"
    with Ledger(path, BUDGET) as ledger:
        ledger.begin(plan, name="one")
        allowed = release(ledger, plan, 10_000)
        assert allowed == plan.steps_within(BUDGET)
    rewrite(path, lambda rows: [row for row in rows if row[0] not in ("charge", "return")])
    with Ledger(path) as ledger:
        ledger.begin(plan, name="one")
        assert release(ledger, plan, 10_000) == allowed


def test_every_flipped_byte_ends_in_one_error_or_in_the_same_ledger(path, pristine):
    """Bytes that SQLite does not use may change; what the ledger says may not."""
    whole, chance = pristine.read_bytes(), random.Random(0)
    said = read_statement(pristine)
    places = [*range(0, 110), *(chance.randrange(len(whole)) for _ in range(100))]
    # Most of the file is free space: the rest of the places are where something is written.
    used = [i for i, byte in enumerate(whole) if byte]
    places += [chance.choice(used) for _ in range(150)]
    found = 0
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= chance.randrange(1, 256)
        path.write_bytes(changed)
        try:
            with Ledger(path) as ledger:
                assert ledger.statement() == said, place
        except LedgerDamaged:
            found += 1
    assert found > 150


@pytest.mark.parametrize("kept", [1, 10, 99, 100, 511, 4096, 5000, 8192, 0.5, 0.9])
def test_a_file_that_was_cut_short(kept, path):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if kept < 1 else kept])
    refused(path)


@pytest.mark.parametrize("fill", [b"", b"\0", b"\xff", b"SQLite format 3\0"])
def test_a_file_of_something_else(fill, path):
    path.write_bytes(fill * 4096)
    refused(path)
    with pytest.raises(LedgerDamaged):
        Ledger(path, BUDGET)


def test_a_ledger_of_format_1_is_named(tmp_path):
    path = tmp_path / "ledger"
    execute(
        path,
        "CREATE TABLE budget (only_row INTEGER PRIMARY KEY, epsilon REAL, delta REAL)",
        "CREATE TABLE runs (id INTEGER PRIMARY KEY, plan TEXT, event_limit INTEGER)",
    )
    assert "format 1" in refused(path)


def test_a_deleted_ledger_leaves_a_log_that_is_not_taken_over(path, tmp_path):
    """SQLite would pour a write-ahead log that lies there into the new file."""
    (tmp_path / "new-wal").write_bytes(b"\x37\x7f\x06\x82" * 20)
    with pytest.raises(LedgerDamaged, match="new-wal"):
        Ledger(tmp_path / "new", BUDGET)
    assert not (tmp_path / "new").exists()


def test_a_ledger_that_is_deleted_while_it_is_open(path):
    ledger = Ledger(path, lease_steps=1)
    ledger.begin(PLAN, name="one")
    path.unlink()
    with pytest.raises(LedgerDamaged, match="deleted"):
        release(ledger, PLAN, 1)
    assert not path.exists()


def test_a_crash_while_a_ledger_is_made_leaves_none(tmp_path, monkeypatch):
    """Then the next attempt makes it; a half-made file at its place would be refused for ever."""
    path = tmp_path / "ledger"
    for step in ("link", "fsync"):
        with monkeypatch.context() as patch:

            def die(*_):
                raise KeyboardInterrupt

            patch.setattr(f"tacit.ledger.store.os.{step}", die)
            with pytest.raises(KeyboardInterrupt):
                Ledger(path, BUDGET)
        assert not path.exists()
    with Ledger(path, BUDGET) as ledger:
        assert release(ledger, gaussian_plan(100.0, 5), 5) == 5


def test_a_second_run_beside_one_that_is_alone_is_not_charged(tmp_path):
    """A forger who adds the run cannot have it charged: exclusivity is computed, not stored."""
    path, plan = tmp_path / "ledger", gaussian_plan(10.0)
    with Ledger(path, Budget(3.0, 1e-5)) as ledger:
        release(ledger, plan, 2)
        (run,) = ledger.statement().runs
        assert run.exclusive

    def change(rows):
        second = json.loads(json.dumps(rows[1][1])) | {"run": 2, "name": "second"}
        attempt = rows[2][1] | {"run": 2}
        return [*rows, ("run", second), ("attempt", attempt)]

    rewrite(path, change)
    with Ledger(path) as ledger:
        ledger.begin(plan, name="second")
        with pytest.raises(BudgetExceeded, match="whole budget"):
            ledger.release(gradient(plan, model := one_weight()), into=model)


def test_costs_of_other_runs_are_computed_from_their_plans(path):
    """Σ of RDP at the ledger's order, written out again."""
    statement = read_statement(path)
    order = float(statement.method.removeprefix("RDP filter at order "))
    spent = order / 2 * (1 / 500**2 + 7 / 100**2 + 1 / 80**2)
    assert statement.epsilon_charged == pytest.approx(epsilon_at(order, spent, BUDGET))


@pytest.mark.parametrize("change", ["DELETE FROM log", "UPDATE log SET digest = x'00'"])
def test_a_last_row_that_is_changed_while_the_ledger_is_open(change, path):
    with Ledger(path) as ledger:
        ledger.statement()
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(f"{change} WHERE seq = (SELECT max(seq) FROM log)")
        with pytest.raises(LedgerDamaged):
            ledger.statement()
