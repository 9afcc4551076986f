"""The ledger: the only place that writes `.grad`. It charges first.

Each rule is decided inside one write transaction, so that processes cannot overspend together:

1. A run's plan is fixed when it begins. Its own ε is by PLD, which is valid for a fixed plan,
   and its number of steps is limited to what its budget allows.
2. A second run is chosen after looking at the first, so runs together are held to the ledger's
   budget by an RDP filter (see `accounting.rdp`), at one order fixed when the first run begins.
3. A first run whose planned RDP would not pass the filter may still run, held to the ledger's
   budget by PLD alone. It is then *exclusive*: no other run is ever admitted. Either the filter
   holds in all outcomes or PLD does; if the outcome chose between them, neither would be proved.
4. Events are charged in leases, durably, before their noise is drawn. A lease is at most one
   percent of the run's events, or one event. A crash wastes at most one lease. A clean end, also
   by an exception, Ctrl-C or sys.exit, returns what was not used.
5. All batches of one shuffled epoch are one event; every other step is an event of its own.
6. Two attempts on a ledger never draw the same seeded batches where sampling amplifies.

`store` keeps the file, `policy` says what its rows mean, `statement` reports.
"""

from __future__ import annotations

import atexit
import datetime
import hashlib
import json
import logging
import os
import sqlite3
import sys
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import dp_accounting as dpa
from torch import nn

from tacit.accounting.events import Release
from tacit.accounting.plan import Plan, check_counts
from tacit.budget import Budget
from tacit.errors import BudgetExceeded, CheckpointRefused, PlanChanged, TacitError, argument
from tacit.ledger.policy import LedgerState, RunState, budget_fields, event_limit
from tacit.ledger.statement import Statement, statement_of
from tacit.ledger.store import LedgerLog
from tacit.randomness import ProcessLock, current_process
from tacit.ranks import Ranks
from tacit.sampling.scheme import UnregisteredScheme, whole_number


class Pending(Protocol):
    """What the ledger charges for: a bounded gradient whose noise has not been drawn yet.

    `tacit.mechanism.PendingRelease` is one. `epoch` is the key of its shuffled epoch; `sampling`
    and `sampling_step` are its place in a seeded stream of batches.
    """

    plan: Plan
    epoch: Hashable | None
    sampling: str | None
    sampling_step: int | None

    def uncovered(self, model: nn.Module) -> list[nn.Parameter]:
        """The model's parameters without a gradient here; raises if it cannot be released."""
        ...

    def draw_into(self, model: nn.Module, *charge: str | int) -> None:
        """Draw the noise, at an address that names this charge, and set `.grad`."""
        ...


class SharedPending(Pending, Protocol):
    """What several ranks release together. `agreed` are public facts that all must have."""

    @property
    def ranks(self) -> Ranks | None: ...

    def agreed(self) -> object: ...


@dataclass(frozen=True)
class RunPosition:
    """Where a run stands on its ledger. A checkpoint holds it, to be recognised.

    `events` are those that were charged and used; what is left of the process's lease is not
    among them. `head` is the digest of a row that the ledger had then.
    """

    ledger: str
    head: str
    run: int
    name: str
    attempt: int
    events: int


@dataclass
class _Attempt:
    """One process's part of a run. What a forked process inherits of it is its parent's."""

    process: object = field(default_factory=current_process)
    number: int = 0  # 0: not logged yet
    lease: int = 0  # events charged and not used
    epochs: set[Hashable] = field(default_factory=set)  # those that are paid for
    drawn: dict[str, set[int | None]] = field(default_factory=dict)  # steps of seeded streams


@dataclass
class _CurrentRun:
    """The run that a ledger has begun; `budget` and `limit` are those of this attempt."""

    id: int
    plan: Plan
    budget: Budget
    limit: int
    attempt: _Attempt
    amplifies: bool
    lease_steps: int | None = None
    num_releases: int = 0
    thread: int = field(default_factory=threading.get_ident)


class Ledger:
    """Charges privacy before it is spent, in one SQLite file for all runs over the same data.

    The file is a log whose rows form a hash chain: an edited, deleted or reordered row raises
    LedgerDamaged when the file is opened. Limits and costs are computed from the stored plans.

    Guarantee: all runs together are (ε, δ)-DP under the budget's neighbouring relation, whenever
    they stop and however later runs are chosen after seeing earlier ones.

    Args:
        path: The ledger's file, made if it is missing. None keeps it in memory, for one process.
        budget: Written once, and the same ever after. Leave it out to open an existing file.
        lease_steps: The most events to charge at once. One percent of a run is the limit anyway.
        anchor: A file elsewhere that follows the ledger's head. It exposes an old copy of the
            ledger that was put back, which the ledger itself cannot detect.

    Example:
        >>> with tacit.Ledger("data.sqlite", tacit.Budget(3.0, 1e-5)) as ledger:
        ...     ledger.release(mechanism.privatise(model, loss, batch), into=model)
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        budget: Budget | None = None,
        *,
        lease_steps: int | None = None,
        anchor: str | os.PathLike[str] | None = None,
    ) -> None:
        if budget is not None and not isinstance(budget, Budget):
            raise TypeError(f"budget is of type {type(budget).__name__}; give a tacit.Budget")
        if lease_steps is not None:
            lease_steps = whole_number("lease_steps", lease_steps, least=1)
        # A number would be the descriptor of an open file.
        path = None if path is None else os.fspath(path)
        if anchor is not None and path is None:
            raise ValueError("a ledger in memory cannot be put back; leave out anchor")
        self.lease_steps = lease_steps
        if budget is None and (path is None or not os.path.exists(path)):
            raise ValueError(f"no ledger at {path}; give a budget to make a new one")
        self._log = LedgerLog(path, budget, anchor=anchor)
        self.path = self._log.path
        self.budget = self._log.budget
        if budget is not None and budget != self.budget:
            raise ValueError(
                f"the ledger at {path} was made for {self.budget}, not {budget}; open it without "
                "a budget, or keep another ledger for other data"
            )
        self._lock = ProcessLock()
        self._run: _CurrentRun | None = None

    def __repr__(self) -> str:
        return f"Ledger({str(self.path) if self.path else None!r}, {self.budget})"

    @property
    def identity(self) -> str:
        """The digest of the first row. It depends on the budget alone, so that a seed repeats a
        run on another ledger of the same budget. Within a ledger, `attempt` tells runs apart."""
        return self._log.identity

    @property
    def head(self) -> str:
        """The digest of the last row. Keep it, so that `verify` can expose an old copy."""
        with self._transaction():
            pass  # other processes may have added rows
        return self._log.head.digest

    def verify(self, head: str | None = None) -> None:
        """Check the whole chain, and that `head`, if given, is in it; raise LedgerDamaged."""
        with self._lock:
            self._log.verify(head)

    def write_anchor(self, anchor: str | os.PathLike[str]) -> None:
        """Write the ledger's head to a file that `Ledger(anchor=...)` will then follow."""
        with self._lock:
            self._log.write_anchor(anchor)

    def begin(
        self,
        plan: Plan,
        *,
        name: str | None = None,
        budget: Budget | None = None,
        lease_steps: int | None = None,
    ) -> None:
        """Start a run, or resume the run of that name if its plan is the same.

        `budget` is the run's own, at most the ledger's, and `lease_steps` the most events that it
        is charged at once, for whoever keeps checkpoints. What a crashed run was charged stays
        charged; resuming it uses what is left. What comes before the first step (`plan.prelude`)
        is charged here: release it after this call, not before.
        """
        run_budget = budget or self.budget
        with self._lock:
            self._require_own_thread()
            self.end()
            for relation in (plan.relation, run_budget.relation):
                if relation is not self.budget.relation:
                    raise ValueError(
                        f"the run is for {relation}, the ledger for {self.budget.relation}; "
                        f"give both the same {argument('relation')}"
                    )
            stored = json.loads(plan.to_json())  # refuses what could not be read back
            check_counts(plan.scheme)
            limit = event_limit(plan, run_budget, self.budget)
            if plan.prelude and limit == 0:
                raise BudgetExceeded(
                    "what comes before the first step leaves no budget for any step; "
                    "nothing is charged"
                )
            with self._log.transaction() as state:
                pass
            if state.runs:  # accounting is slow: fill its cache while the file is not locked
                with suppress(UnregisteredScheme):
                    state.filter()
            with self._log.transaction() as state:
                name = state.free_name() if name is None else name
                run = state.named(name)
                if run is None:
                    run = self._admit(state, name, stored, run_budget)
                elif run.plan != plan:
                    raise PlanChanged(
                        f"run {name!r} began with {run.plan}, not {plan}; give the new run "
                        "a name of its own"
                    )
                # The named values of the prelude are claimed, and no others in their place. The
                # same value again is free.
                for event in plan.prelude:
                    if isinstance(event, Release) and event.name and event.name not in run.claims:
                        self._add_claim(run, event, event.name)
                attempt = _Attempt(number=self._add_attempt(run, run_budget))
            amplifies = plan.scheme.amplifies()
            self._run = _CurrentRun(
                run.id, plan, run_budget, limit, attempt, amplifies, lease_steps
            )
            if self.path is not None:
                _under_way.add(self)

    def require_room(self, plan: Plan, budget: Budget | None = None) -> None:
        """Raise BudgetExceeded unless a new run with this plan could take all of its steps.

        Nothing is charged or reserved: another process may take the room before the run does.
        """
        with self._lock:
            with self._log.transaction() as state:
                pass  # accounting is slow: the file is not locked meanwhile
            if state.has_room(plan, budget or self.budget):
                return
        raise BudgetExceeded(
            f"{plan.steps} steps of noise multiplier {plan.noise_multiplier:.4g} do not fit into "
            f"what is left of this ledger's epsilon {self.budget.epsilon:g} at delta "
            f"{self.budget.delta:g}; nothing is charged. Give the run a smaller epsilon; tacit "
            "ledger show says what was spent"
        )

    def release(self, pending: Pending, into: nn.Module) -> None:
        """Charge a step, then draw its noise and set `.grad`; or raise BudgetExceeded.

        A refusal draws no noise and leaves `.grad` as it was.
        """
        pending.uncovered(into)  # raises if the release cannot succeed
        if getattr(pending, "ranks", None) is not None:
            raise PlanChanged(
                "this gradient is shared by several ranks, which have one ledger together; release "
                "it by a tacit.ledger.SharedLedger"
            )
        with self._lock:
            pending.draw_into(into, *self.charge(pending))

    def charge(self, pending: Pending) -> tuple[str | int, ...]:
        """Charge a step, durably, and return the address of its noise: for a release elsewhere."""
        with self._lock:
            run = self._charge(pending)
            run.num_releases += 1
            return self.identity, *self.attempt(), run.num_releases

    def _charge(self, pending: Pending) -> _CurrentRun:
        self._notice_fork()
        if self._run is None:
            self.begin(pending.plan)
        run = self._running()
        if pending.plan != run.plan:
            raise PlanChanged(
                f"this run planned {run.plan}, and was handed {pending.plan}; a run's noise, "
                "sampling and relation are fixed when it begins: begin another run"
            )
        attempt, step = run.attempt, pending.sampling_step
        batches = pending.sampling if run.amplifies else None
        if batches is not None and step is not None and step in attempt.drawn.get(batches, ()):
            raise PlanChanged(
                "this run has released a gradient of these very records before: two samplers with "
                "one seed draw the same batches; give the sampler another seed, or none"
            )
        new_batches = None if batches in attempt.drawn else batches
        is_paid = pending.epoch is not None and pending.epoch in attempt.epochs
        wanted = 0
        if not is_paid and attempt.lease <= 0:
            # An epoch is charged when it begins: whether there will be another is not known.
            wanted = max(1, run.limit) if pending.epoch is None else 1
        if wanted or new_batches is not None:
            self._take_lease(run, wanted, new_batches)
        if batches is not None:
            attempt.drawn.setdefault(batches, set()).add(step)
        if not is_paid:
            attempt.lease -= 1
        if pending.epoch is not None:
            attempt.epochs.add(pending.epoch)
        return run

    def claim(self, event: dpa.GaussianDpEvent, what: str, key: bytes | None = None) -> None:
        """Use a Gaussian of the run's prelude for the release `what`.

        It was charged when the run began; the claim records that it is used. A run releases each
        `what` once, in all of its attempts: a crash after the claim does not give it back.

        With a secret `key` of 32 random bytes, the run may repeat the claim with that key and no
        other, so that a process that was killed can make its release again. This is sound if the
        key determines the released value: `key` is derived from a secret and the records, and all
        noise is derived from `key`. The value is then a function of (records, secret). To compute
        it twice is to show one release twice, which is post-processing and costs nothing. Other
        records give another key, which is refused. The ledger keeps a digest of the key, which
        tells nothing about the records to whoever does not have the secret. Whoever has it can
        remove the noise: delete it before anybody else sees the value.
        """
        digest = None
        if key is not None:
            if len(key) < 32:
                raise ValueError(f"the key has {len(key)} bytes; give 32 secret random bytes")
            digest = hashlib.blake2b(key, digest_size=32, person=b"tacit claim").hexdigest()
        with self._transaction() as state:
            run = self._planned(state, event, what)
            if digest is not None and run.has_claimed(event, what, digest):
                return
            if digest is not None and what in run.keys:
                raise BudgetExceeded(
                    f"{what}: the run has claimed this release with another key; resume it with "
                    "the records, the device and the secret that it began with, or begin another "
                    "run under a name of its own"
                )
            self._add_claim(run, event, what, digest)

    def claim_next(self, event: dpa.GaussianDpEvent, what: str) -> str:
        """Claim one more such Gaussian of the run's plan, and return the claim's name.

        A run makes as many releases of this multiplier as its plan has, in all processes together.
        After the release, `name_claim` records which value it was.
        """
        with self._transaction() as state:
            run = self._planned(state, event, what)
            name = f"{what}, claim {len(run.claims) + 1}"
            self._add_claim(run, event, name)
        return name

    def name_claim(self, claim: str, name: str) -> None:
        """Record the value of a claim, so that the run accepts it in its prelude (`Release`)."""
        with self._transaction() as state:
            run = self._current(state)
            if claim not in run.claims and name not in run.claims:
                raise PlanChanged(
                    f"the current run, {run.name!r}, has not claimed {claim!r}; name a claim while "
                    "its run is under way"
                )
            if name not in run.claims:
                self._log.append("name", run=run.id, claim=claim, name=name)

    def require_unclaimed(self, event: dpa.GaussianDpEvent, what: str) -> None:
        """Raise what `claim` would raise, and claim nothing."""
        with self._transaction() as state:
            self._planned(state, event, what).require_unclaimed(event, what)

    def claims_of(self, name: str) -> tuple[str, ...] | None:
        """What the run of this name has claimed of its prelude; None if there is no such run."""
        with self._transaction() as state:
            run = state.named(name)
            return None if run is None else tuple(run.claims)

    def run_status(self) -> tuple[int, int]:
        """Of the current run: the events charged, without the unused part of this process's lease,
        and the most there can be. Leases of other processes count as used."""
        with self._transaction() as state:
            run, current = self._current(state), self._running()
            return run.charged - current.attempt.lease, min(run.limit, current.limit)

    def lease_left(self) -> int:
        """Events that are charged to this process and not used: a kill now would waste them."""
        with self._lock:
            self._notice_fork()
            return self._running().attempt.lease

    def position(self) -> RunPosition:
        """Where the current run stands, after what this process has released."""
        run_id, number = self.attempt()
        with self._transaction() as state:
            run, lease = self._current(state), self._running().attempt.lease
            head = self._log.head.digest
            used = run.charged - lease
            return RunPosition(self.identity, head, run_id, run.name, number, used)

    def charged_since(self, position: RunPosition) -> int:
        """Events of that run that were charged after `position` was taken.

        Raises CheckpointRefused if this is another ledger, or an older copy of it.
        """
        where = f"the ledger {self.path}"
        with self._transaction() as state:
            if position.ledger != self.identity or not self._log.holds(position.head):
                raise CheckpointRefused(
                    f"{where} does not have the row that the checkpoint names: it is another "
                    "ledger or an older copy; give the ledger that the run was charged to"
                )
            run = state.runs.get(position.run)
            if run is None or run.name != position.name or run.charged < position.events:
                raise CheckpointRefused(
                    f"{where} has no run {position.name!r} with {position.events} charged events, "
                    "which the checkpoint names; give the ledger that the run was charged to"
                )
            return run.charged - position.events

    def planned_events(self) -> int:
        """The most events the current run may take, as fixed when it first began.

        If it is resumed with a smaller budget, it stops earlier, after looking at what was
        released; so its guarantee is still that of all these events.
        """
        with self._transaction() as state:
            return self._current(state).limit

    def attempt(self) -> tuple[int, int]:
        """Of the current run: its number on this ledger, and its attempt, both counted from 1.

        An attempt is one process's part of a run, from `begin` on; a forked process that continues
        the run has another. Each is logged before anything is charged for it, so no two are the
        same, in any process and whatever is returned. The first is (1, 1).
        """
        with self._lock:
            self._notice_fork()
            run = self._running()
            if run.attempt.number == 0:
                self._take_lease(run, 0)
            return run.id, run.attempt.number

    def end(self) -> None:
        """End the current run and return the unused part of its lease.

        Any thread may end it. Its state is cleared first: if this is interrupted after the commit,
        a second end returns nothing again; if before, the lease is spent.
        """
        with self._lock:
            self._notice_fork()
            run, self._run = self._run, None
            _under_way.discard(self)
            if run is None or run.attempt.number == 0:
                return
            number, lease = run.attempt.number, run.attempt.lease
            with self._log.transaction() as state:
                if state.runs[run.id].dropped:
                    return
                if lease:
                    self._log.append("return", run=run.id, attempt=number, events=lease)
                if state.runs[run.id].charged == 0 and not run.plan.prelude:
                    self._log.append("drop", run=run.id)

    def close(self) -> None:
        with self._lock:
            self.end()
            self._log.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("a ledger cannot be copied or pickled; open its file again instead")

    def statement(self) -> Statement:
        """Every run and the total. Reading it costs nothing."""
        with self._lock:
            with self._log.transaction() as state:
                pass
            # Accounting is slow, and other processes must not wait for the file meanwhile.
            return statement_of(state, self._log.head.digest)

    def _notice_fork(self) -> None:
        """The attempt, its lease and the epochs it paid for belong to the parent process."""
        if self._run is not None and self._run.attempt.process != current_process():
            self._run.attempt = _Attempt()

    def _require_own_thread(self) -> None:
        """Refuse to end a run that another thread began: that thread would report a wrong ε.

        Steps of one run may come from several threads; each is charged.
        """
        run = self._run
        if run is None or run.attempt.process != current_process():
            return
        # Not Thread.is_alive(), which is always true of threads that Python did not start.
        if run.thread != threading.get_ident() and run.thread in sys._current_frames():
            raise RuntimeError(
                "the ledger has a run that another thread began; end it first with ledger.end() "
                "(claims stay), or open the ledger's file again in this thread"
            )

    @contextmanager
    def _transaction(self) -> Iterator[LedgerState]:
        with self._lock:
            self._notice_fork()
            with self._log.transaction() as state:
                yield state

    def _running(self) -> _CurrentRun:
        if self._run is None:
            raise ValueError("no run has begun; begin one, or release a gradient")
        return self._run

    def _current(self, state: LedgerState) -> RunState:
        """The current run, unless another process ended it before anything was charged."""
        run = state.runs[self._running().id]
        if run.dropped:
            raise PlanChanged("another process ended this run; begin it again")
        return run

    def _planned(self, state: LedgerState, event: dpa.GaussianDpEvent, what: str) -> RunState:
        """The current run, which must have such an event in its plan's prelude."""
        if self._run is None or event not in self._run.plan.prelude:
            raise PlanChanged(
                f"{what}: the release costs {event}, and the ledger's current run did not plan for "
                "that; give it to the Trainer, or begin a run with it in Plan(prelude=...)"
            )
        return self._current(state)

    def _admit(self, state: LedgerState, name: str, plan: object, budget: Budget) -> RunState:
        """Rules 2 and 3: admit the run, alone or under the filter, or refuse it."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        number = len(state.runs) + 1
        self._log.append(
            "run", run=number, name=name, started=now, plan=plan, budget=budget_fields(budget)
        )
        run = state.runs[number]
        if not run.first and run.cost(state.filter()[0], 0) > state.room_beside(run):
            raise BudgetExceeded(
                "what comes before the first step would pass the ledger's budget of epsilon "
                f"{self.budget.epsilon:g}, with the runs that it holds; nothing is charged"
            )
        return run

    def _add_claim(
        self, run: RunState, event: dpa.GaussianDpEvent, claim: str, key: str | None = None
    ) -> None:
        run.require_unclaimed(event, claim)
        noise = float(event.noise_multiplier)
        named = {} if key is None else {"key": key}
        self._log.append("claim", run=run.id, claim=claim, noise_multiplier=noise, **named)

    def _add_attempt(self, run: RunState, budget: Budget) -> int:
        number = len(run.attempts) + 1
        self._log.append("attempt", run=run.id, attempt=number, budget=budget_fields(budget))
        return number

    def _take_lease(self, current: _CurrentRun, wanted: int, batches: str | None = None) -> None:
        """Charge up to `wanted` events, at least one if any is wanted, or raise BudgetExceeded.

        Logs the attempt where this process has none: a forked one that continues the run.
        `batches` is the fingerprint of seeded batches that this attempt begins to draw.
        """
        with self._log.transaction() as state:
            run, number = self._current(state), current.attempt.number
            if number == 0:
                number = self._add_attempt(run, current.budget)
            if batches is not None and state.require_new_batches(run.id, number, batches):
                self._log.append("sampling", run=run.id, attempt=number, fingerprint=batches)
            limit, events = min(run.limit, current.limit), 0
            if wanted:
                asked = (most for most in (self.lease_steps, current.lease_steps) if most)
                largest = min(max(1, limit // 100), *asked, wanted)
                events = state.events_left(run, min(wanted, largest), limit)
                if events == 0:
                    raise BudgetExceeded(
                        f"one more step of run {run.name!r} would pass its budget: {run.charged} "
                        f"of at most {limit} are charged, in a ledger for epsilon "
                        f"{self.budget.epsilon:g} at delta {self.budget.delta:g}; nothing was "
                        "released"
                    )
                self._log.append("charge", run=run.id, attempt=number, events=events)
        current.attempt.number = number
        current.attempt.lease += events


# Ledgers with a current run. The reference keeps them alive until Python ends.
_under_way: set[Ledger] = set()


@atexit.register
def _end_all() -> None:
    """End the runs of ledgers that were left open, also after Ctrl-C and sys.exit.

    In a forked process the runs are the parent's, and go on.
    """
    for ledger in list(_under_way):
        lease = ledger._run is not None and ledger._run.attempt.lease
        try:
            ledger.end()
        except (TacitError, sqlite3.Error, OSError) as error:
            if lease and ledger.path is not None and os.path.exists(ledger.path):
                logging.getLogger("tacit").warning("a lease was not returned: %s", error)
