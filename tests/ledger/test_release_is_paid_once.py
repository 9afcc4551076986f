"""A value released before training is paid by one run, and by each run for one value."""

from __future__ import annotations

import copy
import pickle

import attr
import dp_accounting as dpa
import numpy as np
import pytest
import torch
from torch import nn

import tacit
from tacit import Budget, Ledger, Relation
from tacit.accounting import Plan
from tacit.accounting.events import Release
from tacit.data import release_channel_scaler, release_statistics
from tacit.data.private_scaling import release_centre
from tacit.errors import BudgetExceeded, PlanChanged
from tacit.ledger import read_statement

torch.set_num_threads(1)

BUDGET = Budget(3.0, 1e-4)
N, Z = 60, 10.0
INPUTS = torch.rand(N, 3, 2, generator=torch.Generator().manual_seed(0))
GIVEN = {"noise_multiplier": Z, "public_size": N}
RELEASES = {
    "centre": lambda **more: release_centre(INPUTS, **GIVEN, **more),
    "statistics": lambda **more: release_statistics(INPUTS, 0.0, 1.0, **GIVEN, **more),
    "channels": lambda **more: release_channel_scaler(INPUTS, size_bound=1.0, **GIVEN, **more),
}
each = pytest.mark.parametrize("kind", RELEASES)


def trainer(made, book: Ledger | str | None, name: str | None = "one", more=()) -> tacit.Trainer:
    scaler, event = made
    records = tacit.Records(
        scaler(INPUTS).float(), torch.zeros(N, dtype=torch.long), num_classes=2, public_size=N
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    return tacit.Trainer(
        model,
        tacit.losses.CrossEntropy(),
        tacit.PerSampleClip(1.0),
        tacit.PoissonSampler(records, expected_batch_size=20, steps=4),
        torch.optim.SGD(model.parameters(), lr=0.1),
        BUDGET,
        noise=tacit.Noise(4.0),
        ledger=tacit.LedgerRun(book, name, prelude=(event, *more)),
        callbacks=(),
    )


def plan(*multipliers: float) -> Plan:
    events = tuple(map(dpa.GaussianDpEvent, multipliers))
    return Plan(tacit.sampling.Poisson(1 / 3), 4.0, Relation.ADD_OR_REMOVE_ONE, 4, prelude=events)


@each
def test_the_same_value_goes_on_and_another_does_not(kind, tmp_path) -> None:
    path = tmp_path / "ledger.sqlite"
    made = RELEASES[kind]()
    trainer(made, path).fit()
    trainer(made, path).fit()  # goes on with the run, with the value that it paid for
    with pytest.raises(BudgetExceeded, match="has been made"):
        trainer(RELEASES[kind](), path).fit()
    trainer(RELEASES[kind](seed=1), None).fit()


@each
def test_a_seed_gives_the_same_value_and_the_same_name(kind, tmp_path) -> None:
    path = tmp_path / "ledger.sqlite"
    trainer(RELEASES[kind](seed=5), path).fit()
    trainer(RELEASES[kind](seed=5), path).fit()
    with pytest.raises(BudgetExceeded, match="has been made"):
        trainer(RELEASES[kind](seed=6), path).fit()


@each
def test_with_a_ledger_it_is_claimed_before_a_record_is_read(kind, tmp_path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger(path, BUDGET) as book:
        with pytest.raises(PlanChanged, match="did not plan"):
            RELEASES[kind](ledger=book)
        book.begin(plan(Z), name="one")
        made = RELEASES[kind](ledger=book)
        with pytest.raises(BudgetExceeded, match="has been made"):
            RELEASES[kind](ledger=book)
        run = trainer(made, book).fit()
        assert run.epsilon == pytest.approx(plan(Z).epsilon(4, 1e-4), rel=1e-6)
    with Ledger(path, BUDGET) as book:  # another process
        book.begin(plan(Z), name="one")
        with pytest.raises(BudgetExceeded, match="has been made"):
            RELEASES[kind](ledger=book)


def test_nothing_is_computed_where_nothing_is_paid(monkeypatch) -> None:
    from tacit.data import private_scaling

    def read(inputs):
        raise AssertionError("a record was read")

    monkeypatch.setattr(private_scaling, "sum_of_directions", read)
    book = Ledger(None, BUDGET)
    book.begin(plan(2 * Z))
    with pytest.raises(PlanChanged):
        release_centre(INPUTS, **GIVEN, ledger=book)


@each
def test_noise_for_another_relation_is_refused(kind) -> None:
    """Half of the noise, charged as all of it."""
    budget = Budget(BUDGET.epsilon, BUDGET.delta, Relation.REPLACE_ONE)
    poisson = Plan(**{**vars(plan(Z)), "relation": Relation.REPLACE_ONE})
    with Ledger(None, budget) as book:
        book.begin(poisson)
        with pytest.raises(ValueError, match="ledger for replace-one"):
            RELEASES[kind](ledger=book)
        RELEASES[kind](ledger=book, relation="replace-one")
    _, event = RELEASES[kind]()
    with pytest.raises(ValueError, match="noise for add-or-remove-one"):
        Plan(**{**vars(poisson), "prelude": (event,)})
    with Ledger(None, BUDGET) as book:  # twice the noise is not refused
        book.begin(plan(Z))
        _, event = RELEASES[kind](ledger=book, relation="replace-one")
        Plan(**{**vars(plan()), "prelude": (event,)})


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, torch.tensor, int])
def test_a_multiplier_of_any_kind_is_one_release(kind) -> None:
    given = {**GIVEN, "noise_multiplier": kind(10)}
    with Ledger(None, BUDGET) as book:
        book.begin(plan(Z))
        release_centre(INPUTS, **given, ledger=book)
        with pytest.raises(BudgetExceeded, match="has been made"):
            release_centre(INPUTS, **given, ledger=book)
    with Ledger(None, BUDGET) as book:
        book.begin(Plan(**{**vars(plan()), "prelude": (dpa.GaussianDpEvent(kind(10)),)}))
        book.claim(dpa.GaussianDpEvent(kind(10)), "one")
        with pytest.raises(BudgetExceeded, match="has been made"):
            book.claim(dpa.GaussianDpEvent(kind(10)), "two")


def test_a_claim_that_names_its_key_is_repeated_with_that_key_alone(tmp_path) -> None:
    path, event, other = tmp_path / "ledger.sqlite", dpa.GaussianDpEvent(Z), dpa.GaussianDpEvent(9)
    planned = plan(Z, Z, 9)
    key, another = b"k" * 32, b"o" * 32
    with Ledger(path, BUDGET) as book:
        book.begin(planned, name="one")
        book.claim(event, "ranges", key)
        book.claim(event, "counts")
    head = read_statement(path).head
    with Ledger(path) as book:
        book.begin(planned, name="one")
        book.claim(event, "ranges", key)
        assert read_statement(path).head == book.head != head  # `begin` may add a row
        head = book.head
        for refused in (another, None):
            with pytest.raises(BudgetExceeded, match="another key" if refused else "has been made"):
                book.claim(event, "ranges", refused)
        with pytest.raises(BudgetExceeded, match="another key"):
            book.claim(other, "ranges", key)  # the same key, and less noise
        with pytest.raises(BudgetExceeded, match="has been made"):
            book.claim(event, "counts", key)  # it was claimed without a key
        with pytest.raises(BudgetExceeded, match="has been made"):
            book.claim(event, "statistics", key)  # the key is no room for one release more
        with pytest.raises(BudgetExceeded, match="has been made"):
            book.require_unclaimed(event, "ranges")
        with pytest.raises(ValueError, match="32 secret random bytes"):
            book.claim(other, "short", b"k" * 31)
        assert book.head == head
    with Ledger(tmp_path / "other.sqlite", Budget(9.0, 1e-5)) as book:  # what one run has claimed
        for name in ("one", "two"):
            book.begin(planned, name=name)
            book.claim(event, "ranges", key)  # is no other run's


def test_the_ledger_does_not_hold_the_key(tmp_path) -> None:
    path, key = tmp_path / "ledger.sqlite", bytes(range(32))
    with Ledger(path, BUDGET) as book:
        book.begin(plan(Z))
        book.claim(dpa.GaussianDpEvent(Z), "ranges", key)
    content = path.read_bytes()
    assert key not in content
    assert key.hex().encode() not in content


def test_what_another_ledger_has_let_out_is_another_value(tmp_path) -> None:
    path = tmp_path / "ledger.sqlite"

    def elsewhere():
        with Ledger(None, BUDGET) as book:
            book.begin(plan(Z))
            return release_centre(INPUTS, **GIVEN, ledger=book)

    trainer(elsewhere(), path).fit()
    with pytest.raises(BudgetExceeded, match="has been made"):
        trainer(elsewhere(), path).fit()


def test_a_loop_of_ones_own_is_held_to_it_too(tmp_path) -> None:
    path = tmp_path / "ledger.sqlite"
    for place in range(2):
        _, event = RELEASES["centre"]()
        made = Plan(**{**vars(plan()), "prelude": (event,)})
        with Ledger(path, BUDGET) as book:
            if place == 0:
                book.begin(made, name="one")
                continue
            with pytest.raises(BudgetExceeded, match="has been made"):
                book.begin(made, name="one")


def test_a_refused_beginning_charges_nothing() -> None:
    with Ledger(None, BUDGET) as book:
        named = [Release(Z, "one"), Release(Z, "two")]
        book.begin(Plan(**{**vars(plan()), "prelude": named[:1]}), name="a")
        with pytest.raises(BudgetExceeded):
            book.begin(Plan(**{**vars(plan()), "prelude": named[1:]}), name="a")
        (run,) = book.statement().runs
        assert run.steps == 0


def test_one_seed_is_another_noise_for_each_release_of_a_ledger() -> None:
    """Else N·(c1 − c2) is the difference of two records, without noise."""
    other = INPUTS.clone()
    other[0] = -other[0]
    with Ledger(None, BUDGET) as book:
        book.begin(plan(Z, Z))
        first, _ = release_centre(INPUTS, **GIVEN, ledger=book, seed=3)
        second, _ = release_centre(other, **GIVEN, ledger=book, seed=3)
    assert float((N * (first.centre - second.centre)).norm()) > 5.0


def test_two_releases_of_one_run() -> None:
    with Ledger(None, BUDGET) as book:
        book.begin(plan(Z, Z), name="one")
        first, event = release_centre(INPUTS, **GIVEN, ledger=book)
        second, other = release_centre(INPUTS, **GIVEN, ledger=book)
        assert not torch.equal(first.centre, second.centre)
        assert event.name != other.name
        with pytest.raises(BudgetExceeded, match="2 releases"):
            release_centre(INPUTS, **GIVEN, ledger=book)
        trainer((first, event), book, more=(other,)).fit()


def test_another_run_pays_again(tmp_path) -> None:
    with Ledger(tmp_path / "ledger.sqlite", Budget(20.0, 1e-4)) as book:
        trainer(RELEASES["centre"](), book, "one").fit()
        trainer(RELEASES["centre"](), book, "two").fit()
        assert len(book.statement().runs) == 2


def test_a_release_is_the_gaussian_that_it_costs() -> None:
    event = Release(Z, "centre")
    plain = dpa.GaussianDpEvent(Z)
    assert event == plain
    assert plain == event
    assert hash(event) == hash(plain)
    assert event != dpa.GaussianDpEvent(2 * Z)
    assert plan(Z) == Plan(**{**vars(plan()), "prelude": (event,)})
    for again in (copy.deepcopy(event), copy.copy(event), pickle.loads(pickle.dumps(event))):
        assert (again, again.name) == (event, "centre")
    assert attr.evolve(event) == event
    assert dpa.DpEvent.from_named_tuple(event.to_named_tuple()) == event
