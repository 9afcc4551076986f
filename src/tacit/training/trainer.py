"""The training loop: sample, bound, privatise, charge, release, step."""

from __future__ import annotations

import math
import os
import signal
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tacit.accounting.composition import COARSE
from tacit.accounting.plan import Plan, calibrate
from tacit.budget import Budget
from tacit.errors import BudgetExceeded, CheckpointRefused, PlanChanged
from tacit.ledger import Ledger, SharedLedger
from tacit.lipschitz.projection import constraints_of, project
from tacit.losses.record_loss import Scheduled, fresh
from tacit.mechanism import Mechanism
from tacit.noise import Noise
from tacit.precision import floating_type
from tacit.queries.bounded_gradient import GradientQuery, Loss, Recording
from tacit.queries.per_sample_clip import PerSampleClip
from tacit.queries.record_overlap import require_held_out
from tacit.ranks import Ranks
from tacit.records import Records, as_records
from tacit.sampling.sampler import Sampler
from tacit.statistics.running_statistics import PublicStatistics, ReleasedStatistics
from tacit.statistics.tracking import train_unfrozen
from tacit.training import preconditions
from tacit.training.callbacks import Callback, Evaluation, MovingAverage, ProgressBar
from tacit.training.checkpoint import (
    Checkpoint,
    Progress,
    check_state,
    read_checkpoint,
    require_free,
    restore_state,
    save_state,
    signals_between_steps,
)
from tacit.training.evaluation import evaluate
from tacit.training.frozen_weights import FrozenWeights
from tacit.training.preconditions import HeldOut, LedgerRun, Statistics, Unprotected
from tacit.training.rehearsal import finite_weights, rehearse
from tacit.training.run import ENDED_EARLY, OVER_BUDGET, SEEDED, Run, peak_memory_bytes
from tacit.training.state_file import only_process

T = TypeVar("T")


class Trainer:
    """Trains any module with any `torch.optim` optimizer and scheduler, within a budget.

    The weights of the finished run are (ε, δ)-DP in the sampler's records, for the run's own
    `epsilon` and the budget's δ and relation.

        trainer = tacit.Trainer(model, loss, query, sampler, optimizer, tacit.Budget(3.0, 1e-5))
        run = trainer.fit()
        print(run.epsilon, run.summary(test))

    Args:
        noise: `Noise(multiplier, allocation)`. By default the noise is calibrated so that the
            sampler's steps just fit the budget. If a multiplier is given, the run ends when its
            steps are done or the next one would exceed the budget.
        scheduler: a learning-rate scheduler, stepped after each step.
        moving_average: averages the weights; evaluations and the finished model use the average.
        statistics: where BatchNorm's running statistics come from, for a query that takes such
            networks. `PublicStatistics` are set before every evaluation and at the end.
            `ReleasedStatistics` become part of the plan: the noise is calibrated with them, the
            ledger charges them first, and they are set once, at the end. Nothing is evaluated
            before then.
        evaluate_on: held-out records (`Records`, or whatever a sampler takes), or
            `HeldOut(records, every=...)`. Training records are
            refused, unless they are declared `Unprotected`.
        callbacks: by default a progress bar. A list replaces it, and may contain `ProgressBar()`.
        ledger: a file to charge (shared by all runs over the same data), an open `Ledger`, or a
            `LedgerRun` that also has a run name and earlier releases. None counts a single `fit`.
        checkpoint: a `Checkpoint`: where and how often to write the state of the run, so that it
            can be resumed (`fit(resume=...)`). It goes with a ledger in a file.
        mesh: a one-dimensional `DeviceMesh`, to train on several ranks (`tacit.ranks`). Each rank
            makes the same trainer over the same records. The model is the same on all ranks, or
            sharded by `fully_shard(model, mesh=mesh)`. Callbacks run on every rank.
        seed: fixes the noise, the model's own draws (dropout, views), and the sampling where the
            sampler has no seed of its own. Without it all of them are secret.

    Training runs on the model's device and in its floating-point type: float64 inputs of a float32
    model are rounded to float32. `notes` and `config` are copied into the finished run.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        query: GradientQuery,
        sampler: Sampler,
        optimizer: torch.optim.Optimizer,
        budget: Budget,
        *,
        noise: Noise | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        moving_average: MovingAverage | None = None,
        statistics: Statistics | None = None,
        evaluate_on: object = None,
        callbacks: Iterable[Callback] | None = None,
        ledger: LedgerRun | Ledger | str | os.PathLike[str] | None = None,
        checkpoint: Checkpoint | None = None,
        mesh: DeviceMesh | None = None,
        seed: int | None = None,
    ) -> None:
        preconditions.check_arguments(locals())
        self.ranks = None if mesh is None else Ranks(mesh)
        noise = noise or Noise()
        every = evaluate_on.every if isinstance(evaluate_on, HeldOut) else None
        charged = ledger if isinstance(ledger, LedgerRun) else LedgerRun(ledger)
        prelude = charged.prelude
        self.model, self.loss, self.query = model, fresh(loss), query
        self.sampler, self.optimizer, self.budget = sampler, optimizer, budget
        self.scheduler = scheduler
        self.moving_average = moving_average
        first = next(iter(model.parameters()), None)
        if first is None:
            raise ValueError("the model has no parameters to train")
        sharded = self.ranks is not None and self.ranks.shards(model)
        self._device = self.ranks.device if self.ranks and sharded else first.device
        self._floating = floating_type(model)
        preconditions.check_statistics(model, statistics, sampler.records, query)
        self.statistics = statistics
        self.evaluate_every = every or max(1, sampler.steps // 20)
        is_first = self.ranks is None or self.ranks.is_first
        default: list[Callback] = [ProgressBar()] if is_first else []
        self.callbacks = default if callbacks is None else list(callbacks)
        self.run_name = charged.name
        self.checkpoint = checkpoint
        self.seed = seed
        if seed is not None and sampler.seed is None:
            sampler.reseed(seed)
        if self.ranks is not None:
            self.ranks.begin(model)
            preconditions.check_on_ranks(self.ranks, model, query, optimizer, seed)
            sampler.share(self.ranks)
        self.notes = [*sampler.records.notes]
        self.evaluate_on = evaluate_on
        if preconditions.sets_by_row_number(sampler, budget.relation):
            self.notes.append(preconditions.ROW_NUMBERS)
        left_out = preconditions.check_optimizer(model, optimizer)
        if left_out is not None:
            self.notes.append(left_out)
        if statistics is not None:
            self.notes.append(statistics.note)
        if isinstance(statistics, ReleasedStatistics):
            prelude = (*prelude, statistics.event)
            if seed is not None and statistics.seed is None:
                statistics.seed = seed
        self.config: dict[str, Any] = {}
        self._given_records = weakref.ref(sampler.records)
        sampler.to(self._device, self._floating)
        self.ledger = charged.ledger
        self.mechanism = Mechanism(
            query,
            sampler,
            calibrate(budget, sampler, unit=query.unit, prelude=prelude)
            if noise.multiplier is None
            else noise.multiplier,
            relation=budget.relation,
            allocation=noise.allocation,
            prelude=prelude,
            seed=seed,
        )
        self.frozen: FrozenWeights | None = None  # what checkpoints leave out
        self._stop_asked = False
        self._charged_to: Hashable = None
        self._events_before = self._resumed_at = 0
        self._epsilon = math.inf

    def __repr__(self) -> str:
        return (
            f"Trainer({type(self.model).__name__}, {self.query!r}, {self.plan.scheme}, "
            f"steps={self.plan.steps}, noise_multiplier={self.plan.noise_multiplier:.4g}, "
            f"{self.budget})"
        )

    @property
    def evaluate_on(self) -> Records | None:
        """Held-out records. Training records are refused."""
        return self._evaluate_on

    @evaluate_on.setter
    def evaluate_on(self, given: object) -> None:
        data = given.records if isinstance(given, HeldOut) else given
        records = None if data is None else as_records(data)
        if isinstance(given, Unprotected):
            self.notes.append(preconditions.UNPROTECTED_METRICS)
        elif records is not None:
            require_held_out(records, self.sampler.records)
        if records is not None:
            records = records.to(self._device, self._floating)
        self._evaluate_on = records

    @property
    def plan(self) -> Plan:
        """What is accounted for: scheme, noise multiplier, steps and earlier releases."""
        return self.mechanism.plan

    def epsilon_after(self, step: int) -> float:
        """ε spent after this step of the run: a slight over-estimate, on a coarse grid."""
        events = self._events_before + self.plan.scheme.num_events(step - self._resumed_at)
        spent = self.plan.epsilon_of_count(events, self.budget.delta, COARSE)
        # The run's own ε is on a finer grid, and holds for any part of the run.
        return min(spent, self._epsilon)

    def stop(self) -> None:
        """End the run after this step. Its ε is that of the whole plan."""
        self._stop_asked = True

    def whole_model(self) -> AbstractContextManager[None]:
        """Inside, a sharded model has all of its weights on every rank. All ranks must enter."""
        return nullcontext() if self.ranks is None else self.ranks.gathered(self.model)

    def _on_first(self, call: Callable[[], T]) -> T:
        return call() if self.ranks is None else self.ranks.on_first(call)

    def rehearse(self) -> None:
        """Raise ValueError unless model, loss and records go together; `fit` begins with it.

        Nothing is charged, and nothing of what is seen goes into the run. Training records run
        through the model only where each step follows what earlier passes have left behind, which
        is per-sample clipping. Otherwise, the records of `evaluate_on` do.
        """
        views = getattr(self.query, "augmentation", None)
        model = self.model if isinstance(self.query, PerSampleClip) else None
        with self.whole_model():
            rehearse(model, self.loss, self.sampler.records, "the training records", views)
            if self.evaluate_on is not None:
                rehearse(self.model, self.loss, self.evaluate_on, "the records of evaluate_on")

    def fit(self, *, resume: str | os.PathLike[str] | None = None) -> Run:
        """Train until the steps are done or the budget is spent, and return what happened.

        On a ledger, `fit` may be called again: it charges another run, or continues the charges of
        the one of that name. Without a ledger a second call is refused: its ε would not count the
        first.

        `resume` is a folder with the checkpoint of a run that was killed or interrupted. The run
        goes on from there, on its own ledger, and keeps its checkpoints there. What was charged
        after the checkpoint stays charged, and is not drawn again: the run has that many steps
        less. A checkpoint of another ledger, plan, model, optimizer or data is refused, and so is a
        folder that another process trains in.
        """
        kept = None if self.checkpoint is None else self.checkpoint.folder
        with ExitStack() as held:

            def lock() -> None:
                for folder in {os.fspath(f) for f in (resume, kept) if f is not None}:
                    held.enter_context(only_process(folder))

            self._on_first(lock)
            return self._fit(resume)

    def _fit(self, resume: str | os.PathLike[str] | None) -> Run:
        given = self.ledger
        checkpoint, stored = self.checkpoint, None
        if resume is not None:
            stored = self._on_first(lambda: read_checkpoint(resume))
            check_state(stored, self)
            checkpoint = checkpoint or Checkpoint(resume)
            if self.run_name not in (None, stored.position.name):
                raise CheckpointRefused(
                    f"the checkpoint in {resume} is of run {stored.position.name!r}, not "
                    f"{self.run_name!r}; leave the name out, or give that one"
                )
        if checkpoint is not None:
            preconditions.require_ledger_file(given)
            if resume is None:
                self._on_first(lambda: require_free(checkpoint))
        if given is None and self._charged_to is not None:
            raise PlanChanged(
                "fit() was called again without a ledger, so that epsilon would count the second "
                "run alone; make a new model and a new Trainer, or give Trainer(ledger=...) so "
                "that one ledger counts both runs"
            )
        budget = self.budget  # a callback may assign another
        self.rehearse()
        if self.moving_average is not None:
            self.moving_average.begin()
        self._ledger_key = preconditions.ledger_key(given)
        earlier = preconditions.recorded_runs(self.model)
        train_unfrozen(self.model)
        ledger = self._open(given, budget)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        progress = Progress() if stored is None else stored.progress
        name = self.run_name if stored is None else stored.position.name
        for callback in self.callbacks:
            callback.on_begin(self)
        try:
            lost = 0 if stored is None else ledger.charged_since(stored.position)
            every = None if checkpoint is None else checkpoint.every
            ledger.begin(self.plan, name=name, budget=budget, lease_steps=every)
            self._attempt = ledger.attempt()
            self._events_before, _ = ledger.run_status()
            self._resumed_at = progress.start
            planned = ledger.planned_events()
            counted = max(self._events_before, planned)
            self._epsilon = self.plan.epsilon_of_count(counted, budget.delta)
            if self.sampler.seed is not None or stored is not None:
                # A seed that comes again on a ledger must not draw its batches again: the same
                # batch twice is not two samples.
                self.sampler.reseed(self.sampler.seed, ledger.identity, *self._attempt)
            seeds = (self.seed, self.sampler.seed, getattr(self.statistics, "seed", None))
            progress.seeded |= any(seed is not None for seed in seeds)
            if stored is None:
                on_this_ledger = {run for key, run in earlier if key == self._ledger_key}
                about = {
                    preconditions.TRAINED_OUTSIDE_LEDGER: len(on_this_ledger) < len(earlier),
                    preconditions.RESUMED: self._events_before > 0,
                    preconditions.TRAINED_BY_OTHER_RUN: bool(on_this_ledger - {self._attempt[0]}),
                }
                progress.notes = [note for note, applies in about.items() if applies]
            else:
                restore_state(stored, self)
                if progress.ended is None:
                    progress.resumed.append((progress.step, lost))
                for callback in self.callbacks:
                    callback.on_resume(self, progress.step)
            if progress.ended is None:
                if isinstance(self.statistics, ReleasedStatistics):
                    assert isinstance(ledger, Ledger)  # on several ranks they are refused
                    self.statistics.check(self.model, ledger)  # before any step is spent
                stopped = self._loop(ledger, progress, checkpoint)
                if self.moving_average is not None:
                    self.moving_average.swap(self.model)
                    self.moving_average.begin()
                with self.whole_model():
                    self._set_statistics(ledger, progress)
                if checkpoint is not None and stopped in ("plan complete", "budget"):
                    progress.ended = stopped
                    save_state(checkpoint, self, ledger.position(), progress)
            else:
                stopped = progress.ended
            charged, limit = ledger.run_status()
        except BaseException:
            for callback in self.callbacks:
                callback.on_error(self)
            raise
        finally:
            ledger.end() if isinstance(given, Ledger) else ledger.close()
            if isinstance(self.mechanism.query, Recording):
                self.mechanism.query.forget()
            self._stop_asked = False
        with self.whole_model():
            finite = finite_weights(self.model)
        # A run that ended early counts its whole plan: what ended it may have looked at results.
        # A run over its budget counts every step that it was charged under a larger one.
        if max(charged, planned) != counted:
            counted = max(charged, planned)
            self._epsilon = self.plan.epsilon_of_count(counted, budget.delta)
        about = {
            SEEDED: progress.seeded,
            ENDED_EARLY: charged < planned,
            OVER_BUDGET: charged > limit,
            preconditions.DIVERGED: not finite,
        }
        units = "epochs" if self.plan.scheme.steps_within(1) > 1 else "steps"
        resumptions = [*progress.notes, *progress.note(units)]
        # The private records as they were given, if they still exist, and as they were trained on.
        private = {id(r): r for r in (self._given_records(), self.sampler.records) if r is not None}
        run = Run(
            model=self.model,
            loss=self.loss,
            budget=budget,
            plan=self.plan,
            steps=progress.step,
            epsilon=self._epsilon,
            epsilon_rdp=self.plan.epsilon_rdp_of_count(counted, budget.delta),
            seconds=progress.seconds_now(),
            peak_memory_bytes=peak_memory_bytes(self._device),
            seeded=progress.seeded,
            stopped=stopped,
            history=progress.history,
            notes=[*self.notes, *(n for n, applies in about.items() if applies), *resumptions],
            config=self.config,
            charged_steps=self.plan.scheme.steps_within(counted),
            privacy_unit=self.sampler.records.privacy_unit,
            max_physical_batch=self.sampler.max_physical_batch,
        ).trained_on(*private.values())
        for callback in self.callbacks:
            callback.on_end(self, run)
        return run

    def _open(
        self, given: Ledger | str | os.PathLike[str] | None, budget: Budget
    ) -> Ledger | SharedLedger:
        def opened() -> Ledger:
            return given if isinstance(given, Ledger) else Ledger(given, budget)

        return opened() if self.ranks is None else SharedLedger(self.ranks, opened)

    def _loop(
        self, ledger: Ledger | SharedLedger, progress: Progress, checkpoint: Checkpoint | None
    ) -> str:
        """Take the steps that are left, and say why they ended.

        A resumed run takes the first batches of a new iteration, whose draws are new.
        """
        if checkpoint is None:
            return self._steps(ledger, progress, None, [])
        if not checkpoint.with_frozen:
            with self.whole_model():
                self.frozen = FrozenWeights(self.model)
        save_state(checkpoint, self, ledger.position(), progress)
        with signals_between_steps() as caught:
            stopped = self._steps(ledger, progress, checkpoint, caught)
        if signal.SIGTERM in caught:
            raise SystemExit(128 + signal.SIGTERM)  # the run is not over: it waits to be resumed
        return stopped

    def _steps(
        self,
        ledger: Ledger | SharedLedger,
        progress: Progress,
        checkpoint: Checkpoint | None,
        interrupted: list[int],
    ) -> str:
        try:
            for batch in islice(self.sampler, self.sampler.steps - progress.step):
                if isinstance(self.loss, Scheduled):
                    self.loss.at(self.plan.scheme.epochs(progress.step))
                pending = self.mechanism.privatise(self.model, self.loss, batch)
                if ledger.attempt() != self._attempt:
                    raise PlanChanged(
                        "another run was begun on this ledger during this one; give each run the "
                        "ledger's path, or open its file again"
                    )
                self._record_run()
                try:
                    ledger.release(pending, into=self.model)
                except BudgetExceeded:
                    return "budget"
                self.optimizer.step()
                self._project()
                if self.scheduler is not None:
                    self.scheduler.step()
                if self.moving_average is not None:
                    self.moving_average.update(self.model)
                progress.step += 1
                self._after_step(progress)
                over = self._stop_asked or bool(interrupted)
                due = checkpoint is not None and self._is_due(checkpoint, ledger, progress)
                if self.ranks is not None:
                    over, due = self.ranks.any(over, due)
                if checkpoint is not None and (due or over):
                    save_state(checkpoint, self, ledger.position(), progress)
                if over:
                    return "interrupted" if interrupted else "asked to"
        except KeyboardInterrupt:
            if self.ranks is not None:
                raise  # this process must end, so that the other ranks do not wait for it
            return "interrupted"
        return "plan complete"

    def _project(self) -> None:
        """Onto the Lipschitz set, where the model has one."""
        if self.ranks is None:
            project(self.model)
        elif constraints_of(self.model):
            with self.whole_model():
                project(self.model)

    def _is_due(
        self, checkpoint: Checkpoint, ledger: Ledger | SharedLedger, progress: Progress
    ) -> bool:
        steps, num_events = progress.step - progress.start, self.plan.scheme.num_events
        used_up = ledger.lease_left() == 0 and num_events(steps + 1) > num_events(steps)
        seconds = time.perf_counter() - progress.written
        last = progress.step == self.sampler.steps
        return last or checkpoint.due(steps, seconds, used_up)

    def _after_step(self, progress: Progress) -> None:
        step = progress.step
        for callback in self.callbacks:
            callback.on_step(self, step)
        if self.evaluate_on is None or isinstance(self.statistics, ReleasedStatistics):
            return
        if step % self.evaluate_every and step != self.sampler.steps:
            return
        average = self.moving_average
        averaged = nullcontext() if average is None else average.applied(self.model)
        with averaged, self.whole_model():
            if self.statistics is not None:
                self.statistics.apply(self.model)
            self._evaluate(self.evaluate_on, progress)

    def _set_statistics(self, ledger: Ledger | SharedLedger, progress: Progress) -> None:
        """BatchNorm's running statistics for the weights that the run ends with."""
        if isinstance(self.statistics, PublicStatistics):
            self.statistics.apply(self.model)
        elif isinstance(self.statistics, ReleasedStatistics):
            assert isinstance(ledger, Ledger)
            self._record_run()
            self.statistics.apply(self.model, ledger)
            if self.evaluate_on is not None:
                self._evaluate(self.evaluate_on, progress)

    def _evaluate(self, records: Records, progress: Progress) -> None:
        metrics = evaluate(self.model, records, self.loss, self.sampler.max_physical_batch)
        if metrics.loss is None:  # no records
            return
        evaluation = Evaluation(progress.step, self.epsilon_after(progress.step), metrics)
        progress.history.append(evaluation)
        for callback in self.callbacks:
            callback.on_evaluation(self, evaluation)

    def _record_run(self) -> None:
        """Record the run before anything is released: an interrupted step may have been seen."""
        charged_to = (self._ledger_key, self._attempt[0])
        if self._charged_to != charged_to:
            preconditions.record_run(self.model, *charged_to)
        self._charged_to = charged_to
