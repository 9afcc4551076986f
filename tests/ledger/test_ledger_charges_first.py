"""At the moment noise is drawn, its charge is already on disk."""

import copy
import pickle
import sqlite3

import pytest
from ledger_children import charge_late
from tiny_run import ROOMY, charged, gaussian_plan, gradient, one_weight, release

from tacit import Ledger
from tacit.errors import BudgetExceeded
from tacit.randomness import Stream


class Watch:
    """Looks into the file, by a connection of its own, whenever noise is drawn."""

    def __init__(self, monkeypatch, path):
        self.shortfalls, self.draws = [], 0
        drawn = Stream.normals

        def normal(source, *args):
            self.draws += 1
            if charged(path) < self.draws:
                self.shortfalls.append(self.draws)
            return drawn(source, *args)

        monkeypatch.setattr(Stream, "normals", normal)


@pytest.mark.parametrize("lease_steps", [1, 5, 64])
def test_every_draw_has_been_charged(lease_steps, tmp_path, monkeypatch):
    watch = Watch(monkeypatch, tmp_path / "ledger")
    with Ledger(tmp_path / "ledger", ROOMY, lease_steps=lease_steps) as ledger:
        assert release(ledger, gaussian_plan(steps=20), 30) == 20
    assert watch.draws == 20
    assert watch.shortfalls == []
    assert charged(tmp_path / "ledger") == 20


def test_the_watch_sees_a_ledger_that_charges_late(tmp_path, monkeypatch):
    watch = Watch(monkeypatch, tmp_path / "ledger")
    monkeypatch.setattr(Ledger, "release", charge_late)
    with Ledger(tmp_path / "ledger", ROOMY, lease_steps=1) as ledger:
        release(ledger, gaussian_plan(steps=5), 5)
    assert watch.shortfalls == [1, 2, 3, 4, 5]


def test_a_refusal_draws_nothing_and_leaves_the_gradient_alone(tmp_path, monkeypatch):
    plan, model = gaussian_plan(steps=2), one_weight()
    ledger = Ledger(tmp_path / "ledger", ROOMY)
    assert release(ledger, plan, 2) == 2
    watch = Watch(monkeypatch, tmp_path / "ledger")
    model.weight.grad = model.weight.detach() + 1
    kept = model.weight.grad
    before = kept.clone()
    for _ in range(3):
        with pytest.raises(BudgetExceeded, match="nothing was"):
            ledger.release(gradient(plan, model), into=model)
    assert model.weight.grad is kept
    assert kept.equal(before)
    assert watch.draws == 0
    assert ledger.run_status() == (2, 2)


def test_one_gradient_is_released_once(tmp_path):
    plan, model = gaussian_plan(steps=5), one_weight()
    ledger = Ledger(tmp_path / "ledger", ROOMY)
    private = gradient(plan, model)
    ledger.release(private, into=model)
    before = model.weight.grad.clone()
    with pytest.raises(RuntimeError, match="released already"):
        ledger.release(private, into=model)
    assert model.weight.grad.equal(before)


def test_a_gradient_of_another_model_is_not_drawn(tmp_path, monkeypatch):
    plan = gaussian_plan(steps=5)
    ledger = Ledger(tmp_path / "ledger", ROOMY)
    watch = Watch(monkeypatch, tmp_path / "ledger")
    with pytest.raises(ValueError, match="another model"):
        ledger.release(gradient(plan, one_weight()), into=one_weight())
    assert watch.draws == 0


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_ledger_cannot_be_copied(copy_of):
    with pytest.raises(TypeError, match="open its file again"):
        copy_of(Ledger(budget=ROOMY))


def test_an_end_that_is_interrupted_gives_the_lease_back_once(tmp_path, monkeypatch):
    """Ctrl-C may come when the commit is made and nobody knows yet; closing ends it again."""

    class Interrupted(sqlite3.Connection):
        armed = False

        def close(self):
            super().close()
            if Interrupted.armed:
                Interrupted.armed = False
                raise KeyboardInterrupt

    def connect(*args, **settings):
        return connected(*args, factory=Interrupted, **settings)

    connected = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", connect)
    ledger = Ledger(tmp_path / "ledger", ROOMY, lease_steps=20)
    assert release(ledger, gaussian_plan(steps=40), 30) == 30
    Interrupted.armed = True
    with pytest.raises(KeyboardInterrupt):
        ledger.end()
    ledger.close()
    assert charged(tmp_path / "ledger") == 30
