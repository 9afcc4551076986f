"""Killed at any moment, a run has drawn no more than it was charged for."""

import random
import time

import pytest
from ledger_children import CLEAN, num_draws, train
from tiny_run import charged, gaussian_plan

from tacit import Budget, Ledger

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
