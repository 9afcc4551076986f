"""What other processes do to a ledger, and how tests start, kill and question them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from contextlib import contextmanager

from tiny_run import gradient, one_weight, release

from tacit import Budget, Ledger
from tacit.accounting import Plan
from tacit.errors import BudgetExceeded
from tacit.ledger.store import LedgerLog
from tacit.randomness import Stream

# A server that has imported torch and Tacit once and forks clean children: none inherits a ledger.
# `import tacit` alone would leave the imports to every child.
CLEAN = multiprocessing.get_context("forkserver")
CLEAN.set_forkserver_preload(["torch", "tacit.ledger", "tacit.mechanism", "scipy.optimize"])


def record_draws(side_file: str) -> None:
    """From now on every draw of noise first leaves a byte that survives this process."""
    side = os.open(side_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    drawn = Stream.flat_normals

    def draw(self, *args):
        os.write(side, b".")
        return drawn(self, *args)

    Stream.flat_normals = draw


def num_draws(side_file) -> int:
    return os.path.getsize(side_file) if os.path.exists(side_file) else 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def charge_late(self, private, into) -> None:
    """The planted mistake: release, then charge."""
    private.draw_into(into)
    self._charge(private)


def train(path, name, plan_text, lease_steps, side_file, kill_at=None, late=False) -> None:
    """A training loop until the budget ends, or until killed (by itself, at `kill_at`)."""
    record_draws(side_file)
    if late:
        Ledger.release = charge_late
    plan = Plan.from_json(plan_text)
    model = one_weight()
    ledger = Ledger(path, lease_steps=lease_steps)
    ledger.begin(plan, name=name)
    if kill_at is not None:
        _plant_kill(*kill_at)
    try:
        while True:
            ledger.release(gradient(plan, model), into=model)
    except BudgetExceeded:
        ledger.close()


def _plant_kill(moment: str, countdown: int) -> None:
    """Die at the `countdown`-th time that `moment` comes."""
    left = [countdown]

    def now() -> None:
        left[0] -= 1
        if left[0] == 0:
            die()

    whole = LedgerLog.transaction

    @contextmanager
    def transaction(self):
        with whole(self) as state:
            yield state
            if moment == "before commit":
                now()
        if moment == "after commit":
            now()

    LedgerLog.transaction = transaction
    draw = Stream.flat_normals

    def normal(self, *args):
        if moment == "before draw":
            now()
        result = draw(self, *args)
        if moment == "after draw":
            now()
        return result

    Stream.flat_normals = normal


def compete(gate, results, path, budget, name, plan_text, attempts, more) -> None:
    """Open, wait for all, then take as much as there is; report how many steps were released."""
    try:
        plan = Plan.from_json(plan_text)
        gate.wait(60)
        with Ledger(path, budget, **more) as ledger:
            try:
                ledger.begin(plan, name=name)
            except BudgetExceeded:
                results.put(("refused", 0))
                return
            results.put(("ran", release(ledger, plan, attempts)))
    except BaseException:
        results.put(("error: " + traceback.format_exc(), 0))


def race(
    context, path, budget: Budget, jobs, lease_steps=3, fresh=False, **more
) -> list[tuple[str, int]]:
    """Run (name, plan, attempts) each in a process of its own, all at once."""
    more["lease_steps"] = lease_steps
    if not fresh:
        Ledger(path, budget).close()
    gate, results = context.Barrier(len(jobs)), context.Queue()
    processes = [
        context.Process(
            target=compete,
            args=(gate, results, path, budget, name, plan.to_json(), attempts, more),
        )
        for name, plan, attempts in jobs
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=90) for _ in processes]
    for process in processes:
        process.join(30)
    errors = [what for what, _ in found if what.startswith("error")]
    assert not errors, errors[0]
    return found
