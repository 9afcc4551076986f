"""Fork copies memory, leases included; it must not copy what they allow."""

import os

import pytest
from forked import Forked
from tiny_run import charged, gaussian_plan, release

from tacit import Budget, Ledger

ROOMY = Budget(3.0, 1e-13)  # so small a δ is accounted for by RDP, which takes no time
PLAN = gaussian_plan(1000.0, 2000)  # a lease is 20 steps


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


def half_used(path, lease_steps=20):
    ledger = Ledger(path, ROOMY, lease_steps=lease_steps)
    ledger.begin(PLAN, name="mine")
    assert release(ledger, PLAN, 5) == 5
    return ledger


def nothing_first(ledger):
    pass


BEFORE = {
    "nothing": nothing_first,
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
    ledger = Ledger(path, ROOMY)
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
    ledger = Ledger(budget=ROOMY)
    release(ledger, PLAN, 1)
    how, why = Forked(lambda: release(ledger, PLAN, 1)).result()
    assert how == "raised"
    assert "memory" in why
