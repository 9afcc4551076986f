"""At the moment noise is drawn its charge is on disk; killed at any moment, a run has paid."""

from __future__ import annotations

import copy
import pickle
import random
import sqlite3
import time

import pytest
from ledger_children import CLEAN, charge_late, num_draws, train
from tiny_run import ROOMY, charged, gaussian_plan, gradient, one_weight, release

from tacit import Budget, Ledger
from tacit.errors import BudgetExceeded
from tacit.randomness import Stream


class Watch:
    """Looks into the file, by a connection of its own, whenever noise is drawn."""

    def __init__(self, monkeypatch, path):
        self.shortfalls, self.draws = [], 0
        drawn = Stream.flat_normals

        def normal(source, *args):
            self.draws += 1
            if charged(path) < self.draws:
                self.shortfalls.append(self.draws)
            return drawn(source, *args)

        monkeypatch.setattr(Stream, "flat_normals", normal)


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


# Killed at any moment, a run has drawn no more than it was charged for.


BUDGET = Budget(3.0, 1e-13)  # so small a δ is accounted for by RDP, which takes no time
STEPS = {1: 200, 5: 600, 64: 6000}  # by the size of a lease: each lease waits for the disk


class Lives:
    """One run, over many processes that are killed."""

    def __init__(self, folder, lease_steps):
        self.path, self.side = str(folder / "ledger"), str(folder / "draws")
        self.lease_steps, self.kills = lease_steps, 0
        self.plan, self.limit = gaussian_plan(1000.0, STEPS[lease_steps]), STEPS[lease_steps]
        Ledger(self.path, BUDGET).close()

    def start(self, **more):
        process = CLEAN.Process(
            target=train,
            args=(self.path, "mine", self.plan.to_json(), self.lease_steps, self.side),
            kwargs=more,
        )
        process.start()
        return process

    def kill_after(self, seconds):
        before, process = num_draws(self.side), self.start()
        while process.is_alive() and num_draws(self.side) == before:
            time.sleep(0.001)
        time.sleep(seconds)
        process.kill()
        process.join()
        self.kills += process.exitcode == -9
        return process.exitcode

    def check(self):
        draws, on_disk = num_draws(self.side), charged(self.path)
        assert draws <= on_disk, "drew more than was charged"
        assert on_disk - draws <= self.kills * self.lease_steps, "wasted more than a lease a kill"
        assert on_disk <= self.limit
        return draws

    def finish(self):
        process = self.start()
        process.join(60)
        assert process.exitcode == 0
        assert charged(self.path) == self.limit
        assert self.limit - self.kills * self.lease_steps <= self.check() <= self.limit


@pytest.mark.parametrize("lease_steps", [1, 5, 64])
def test_killed_at_random_moments(lease_steps, tmp_path):
    lives, moments = Lives(tmp_path, lease_steps), random.Random(lease_steps)
    while lives.kills < 12 and charged(lives.path) < lives.limit:
        if lives.kill_after(moments.choice([0, 0.002, 0.02]) * moments.random()) == 0:
            break
        lives.check()
    assert lives.kills >= 10
    lives.finish()


@pytest.mark.parametrize("lease_steps", [1, 5, 64])
def test_killed_around_every_commit_and_draw(lease_steps, tmp_path):
    lives = Lives(tmp_path, lease_steps)
    for moment in ("before commit", "after commit", "before draw", "after draw"):
        for countdown in (1, 2, 7):
            process = lives.start(kill_at=(moment, countdown))
            process.join(60)
            assert process.exitcode == -9
            lives.kills += 1
            lives.check()
    lives.finish()


def test_the_check_sees_a_ledger_that_charges_late(tmp_path):
    lives = Lives(tmp_path, lease_steps=1)
    process = lives.start(kill_at=("before commit", 1), late=True)
    process.join(60)
    assert process.exitcode == -9
    lives.kills += 1
    with pytest.raises(AssertionError, match="more than was charged"):
        lives.check()
