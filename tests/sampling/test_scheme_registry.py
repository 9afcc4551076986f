"""A scheme of one's own: registered, checked, stored, and read back; or refused before storage."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import dp_accounting as dpa
import pytest
from forked import Forked
from tiny_run import ADD, gaussian_plan, log_rows, release

import tacit
from tacit import Budget, Ledger, register_scheme
from tacit.accounting import Plan, check_scheme
from tacit.errors import UnsupportedEvent
from tacit.ledger.statement import read_statement
from tacit.sampling.scheme import Unit

BUDGET = Budget(3.0, 1e-13)


@dataclass(frozen=True)
class Weekdays:
    """Each record on one of `days` days, chosen in advance: no amplification."""

    days: int = 7

    def step_event(self, noise_multiplier, unit=Unit.RECORD):
        if unit is not Unit.RECORD:
            raise UnsupportedEvent("records only")
        return dpa.GaussianDpEvent(noise_multiplier)

    def num_events(self, steps):
        return -(-steps // self.days)

    def steps_within(self, events):
        return events * self.days

    def epochs(self, steps):
        return steps / self.days

    def amplifies(self):
        return False

    def require(self, relation):
        return None

    def describe(self):
        return f"one of {self.days} days"


PLAN = Plan(Weekdays(), 100.0, ADD, 70)


def own_scheme(name, **methods):
    return dataclass(frozen=True)(type(name, (Weekdays,), methods))


def in_a_process_that_knows(cls, work):
    """This process has not imported the module that registers the scheme."""

    def child():
        register_scheme(cls)
        return work()

    how, found = Forked(child).result()
    assert how == "done", found
    return found


def test_a_scheme_that_is_not_registered_is_refused_before_it_is_stored(tmp_path):
    """It was stored, and then nobody could open the file."""
    with Ledger(tmp_path / "ledger", BUDGET) as ledger:
        before = ledger.head
        with pytest.raises(UnsupportedEvent, match="register_scheme"):
            ledger.begin(Plan(own_scheme("NeverRegistered")(), 100.0, ADD, 70))
        assert ledger.head == before
        assert release(ledger, gaussian_plan(100.0, 5), 5) == 5
    assert len(read_statement(tmp_path / "ledger").runs) == 1


def test_a_registered_scheme_is_stored_and_read_back(tmp_path):
    register_scheme(Weekdays)
    check_scheme(Weekdays())
    with Ledger(tmp_path / "ledger", BUDGET) as ledger:
        ledger.begin(PLAN, name="mine")
        assert release(ledger, PLAN, 3) == 3
    with Ledger(tmp_path / "ledger") as ledger:
        (run,) = ledger.statement().runs
        assert run.plan == PLAN
        ledger.begin(PLAN, name="mine")
        assert ledger.run_status() == (3, 10)
    (row,) = log_rows(tmp_path / "ledger", "run")
    assert row["plan"]["scheme"] == {"kind": "Weekdays", "days": 7}


def test_a_ledger_with_an_unknown_scheme_can_still_be_opened(tmp_path):
    path, elsewhere = tmp_path / "ledger", own_scheme("Elsewhere")

    def written():
        plan = Plan(elsewhere(), 100.0, ADD, 70)
        with Ledger(path, BUDGET) as ledger:
            ledger.begin(plan, name="mine")
            release(ledger, plan, 2)
            return [run.epsilon for run in ledger.statement().runs]

    known = in_a_process_that_knows(elsewhere, written)
    other = gaussian_plan(1000.0, 5)
    with Ledger(path) as ledger:
        (run,) = ledger.statement().runs
        assert run.plan is None
        assert run.epsilon == float("inf")
        assert "'Elsewhere' is not registered" in run.note
        assert "import" in run.note
        before = ledger.head
        with pytest.raises(UnsupportedEvent, match="import the module"):
            ledger.begin(other, name="other")  # what mine costs is needed, and unknown
        assert ledger.head == before
    register_scheme(elsewhere)
    with Ledger(path) as ledger:  # imported, nothing is lost
        assert [run.epsilon for run in ledger.statement().runs] == known
        ledger.begin(other, name="other")
        assert release(ledger, other, 5) == 5


def test_several_runs_of_which_one_is_unknown(tmp_path):
    path, other = tmp_path / "ledger", gaussian_plan(1000.0, 500)
    unknown = own_scheme("Unknown")
    running = Ledger(path, BUDGET, lease_steps=1)
    running.begin(other, name="other")
    release(running, other, 2)

    def beside():
        plan = Plan(unknown(), 100.0, ADD, 70)
        with Ledger(path) as ledger:
            ledger.begin(plan, name="mine")
            return release(ledger, plan, 1)

    assert in_a_process_that_knows(unknown, beside) == 1
    statement = running.statement()
    assert statement.epsilon == BUDGET.epsilon
    assert statement.epsilon_charged == float("inf")
    assert "Unknown" in statement.method
    with pytest.raises(UnsupportedEvent, match="Unknown"):
        release(running, other, 1)
    register_scheme(unknown)
    assert release(running, other, 1) == 1


def test_a_name_belongs_to_one_class():
    register_scheme(Weekdays)

    @dataclass(frozen=True)
    class Other(Weekdays):
        pass

    with pytest.raises(ValueError, match="belongs to"):
        register_scheme(name="Poisson")(Other)
    with pytest.raises(ValueError, match="belongs to"):
        register_scheme(name="Weekdays")(Other)
    assert register_scheme(name="Other days")(Other) is Other
    plan = Plan(Other(3), 1.0, ADD, 6)
    assert json.loads(plan.to_json())["scheme"]["kind"] == "Other days"
    assert Plan.from_json(plan.to_json()) == plan
    assert register_scheme(Weekdays) is Weekdays  # the same again, as after a reload


def test_what_is_no_frozen_dataclass_is_refused():
    @dataclass
    class Thawed:
        rate: float = 1.0

    @dataclass(frozen=True)
    class Incomplete:
        rate: float = 1.0

    @dataclass(frozen=True)
    class Kind(Weekdays):
        kind: int = 1

    for cls, why in ((Thawed, "frozen"), (Incomplete, "step_event"), (Kind, "reserved")):
        with pytest.raises(ValueError, match=why):
            register_scheme(cls)


class Broken:
    """Schemes that cannot be read back as they were."""

    @dataclass(frozen=True)
    class Tuple(Weekdays):
        sizes: tuple[int, ...] = (1, 2)

    @dataclass(frozen=True)
    class List(Weekdays):
        sizes: list[int] = field(default_factory=list)

    @dataclass(frozen=True)
    class Set(Weekdays):
        sizes: frozenset[int] = frozenset({1})

    @dataclass(frozen=True)
    class NotANumber(Weekdays):
        rate: float = float("nan")

    @dataclass(frozen=True)
    class Hidden(Weekdays):
        made: int = field(default=3, init=False)


@pytest.mark.parametrize("name", ["Tuple", "List", "Set", "NotANumber", "Hidden"])
def test_what_cannot_be_read_back_is_not_stored(name, tmp_path):
    scheme = register_scheme(getattr(Broken, name))()
    with Ledger(tmp_path / "ledger", BUDGET) as ledger:
        before = ledger.head
        with pytest.raises(UnsupportedEvent, match="read back"):
            ledger.begin(Plan(scheme, 100.0, ADD, 70))
        assert ledger.head == before


OUR_OWN = [
    tacit.sampling.Poisson(0.1),
    tacit.sampling.Poisson(1.0),
    tacit.sampling.WithoutReplacement(50, 5),
    tacit.sampling.WithoutReplacement(50, 50),
    tacit.sampling.MiniSets(10, 3, chosen=2),
    tacit.sampling.MiniSets(10, 3, rate=1.0),
    tacit.sampling.ShuffledEpochs(8),
]


@pytest.mark.parametrize("scheme", OUR_OWN, ids=lambda scheme: scheme.describe())
def test_our_own_schemes_meet_the_contract(scheme):
    check_scheme(scheme)


def test_which_schemes_amplify():
    assert [s.amplifies() for s in OUR_OWN] == [True, False, True, False, True, False, False]


def poisson_in_disguise(self, noise_multiplier, unit=Unit.RECORD):
    return dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(noise_multiplier))


def refuses(self, relation):
    raise UnsupportedEvent("neither")


MISTAKES = {
    "two events a step": ({"num_events": lambda self, steps: 2 * steps}, "one event at the most"),
    "free steps": ({"num_events": lambda self, steps: 0}, "one event at the most"),
    "free first step": ({"num_events": lambda self, steps: max(0, steps - 1)}, "one event"),
    "half events": ({"num_events": lambda self, steps: steps / 1}, "integers"),
    "not inverse": ({"steps_within": lambda self, events: events}, "steps_within"),
    "too many steps": ({"steps_within": lambda self, events: 8 * events}, "above"),
    "no epochs": ({"epochs": lambda self, steps: 0.0}, "epoch"),
    "epochs run back": ({"epochs": lambda self, steps: -steps}, "epoch"),
    "no words": ({"describe": lambda self: ""}, "describe"),
    "no answer": ({"amplifies": lambda self: None}, "amplifies"),
    "amplifies in secret": ({"step_event": poisson_in_disguise}, "Gaussian alone"),
    "no relation": ({"require": refuses}, "no relation"),
    "unknown event": (
        {"step_event": lambda self, z, unit=Unit.RECORD: dpa.LaplaceDpEvent(z)},
        "no sound analysis",
    ),
    "less noise is cheaper": (
        {"step_event": lambda self, z, unit=Unit.RECORD: dpa.GaussianDpEvent(3 / z)},
        "more noise",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_check_finds_a_broken_scheme(name):
    methods, why = MISTAKES[name]
    cls = register_scheme(own_scheme("Mistaken", **methods))
    with pytest.raises(UnsupportedEvent, match=why):
        check_scheme(cls())


@pytest.mark.parametrize("name", ["two events a step", "free steps"])
def test_a_ledger_does_not_let_a_scheme_count_wrongly(name):
    """A release is charged as one event: what costs two would be charged half."""
    methods, why = MISTAKES[name]
    cls = register_scheme(own_scheme("Mistaken", **methods))
    with Ledger(None, BUDGET) as ledger, pytest.raises(UnsupportedEvent, match=why):
        ledger.begin(Plan(cls(), 100.0, ADD, 70))


def test_a_class_that_is_defined_again_costs_what_the_new_one_says():
    """A notebook: nothing that was computed for the first definition is used for the second."""
    limits = []
    for factor in (1.0, 0.5):

        def step_event(self, z, unit=Unit.RECORD, factor=factor):
            return dpa.GaussianDpEvent(z * factor)

        cls = register_scheme(own_scheme("Redefined", step_event=step_event))
        with Ledger(None, BUDGET) as ledger:
            ledger.begin(Plan(cls(), 20.0, ADD))
            limits.append(ledger.planned_events())
    assert limits[1] < limits[0]
