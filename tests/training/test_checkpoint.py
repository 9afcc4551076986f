"""A run that goes on from its checkpoint is the run that was not interrupted, and nobody else's."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from small_trainer import network, small_trainer, some_records
from torch import nn
from torch.optim import lr_scheduler

import tacit
from tacit.errors import CheckpointRefused, PlanChanged, TacitError
from tacit.ledger import read_statement
from tacit.ledger.store import LedgerLog
from tacit.randomness import Randomness, Stream
from tacit.sampling import FixedSizeSampler, MiniSetSampler, PoissonSampler, ShuffleSampler
from tacit.training import Checkpoint, LedgerRun, MovingAverage, Sparsification
from tacit.training.checkpoint import FILE
from tacit.training.state_file import only_process, read_state

REPLACE = tacit.Budget(1000.0, 1e-3, tacit.Relation.REPLACE_ONE)


class At(tacit.Callback):
    """Does something to the trainer after a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step(self, trainer, step):
        if step == self.step:
            self.act(trainer)


def stop(trainer):
    trainer.stop()


def fail(trainer):
    raise OSError("as if the machine had failed")


@pytest.fixture
def no_noise(monkeypatch):
    """Noise is what legally differs after an interruption. Without it two runs must be equal."""

    def zeros(self, sizes, device, parameters=None, starts=None):
        return torch.zeros(sum(sizes), dtype=torch.float64, device=device)

    monkeypatch.setattr(Stream, "flat_normals", zeros)


def trainer_on(folder, model=None, *, callbacks=(), every=None, name="run", **more):
    return small_trainer(
        model,
        **{
            "steps": 8,
            "ledger": LedgerRun(folder / "ledger.sqlite", name),
            "checkpoint": Checkpoint(folder, every),
            "callbacks": callbacks,
        }
        | more,
    )


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def everybody(records, steps):
    return PoissonSampler(records, 1.0, expected_batch_size=40, steps=steps)


def with_statistics(steps):
    return {"query": tacit.BatchClip(0.5, 4), "sampler": all_sets(some_records(), steps)}


def all_sets(records, steps):
    return MiniSetSampler(records, 4, steps, chosen=10)


def batch_norm_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def lipschitz_network():
    torch.manual_seed(0)
    layer = tacit.lipschitz.SpectralLinear
    bounded = tacit.lipschitz.BoundedInput(3.0)
    return nn.Sequential(bounded, layer(4, 6), tacit.lipschitz.GroupSort(2), layer(6, 2))


ADAPTIVE = tacit.AdaptiveNorm(1.0, count_noise=30.0)


def public():
    return replace(some_records(60, seed=9), name="public")


ROUTES = {
    "clip": lambda: (network(), tacit.PerSampleClip(0.5), everybody),
    "adaptive": lambda: (network(), tacit.PerSampleClip(ADAPTIVE), everybody),
    "factors": lambda: (
        network(),
        tacit.PerSampleClip(
            tacit.queries.LayerFactors(
                public(), tacit.queries.Decaying(1.0, 0.9, every=2), every=3
            ),
            blocks=tacit.by_layer,
        ),
        everybody,
    ),
    "clipless": lambda: (lipschitz_network(), tacit.Clipless(gradient_clip=ADAPTIVE), everybody),
    "batch clip": lambda: (network(), tacit.BatchClip(0.5, 4), all_sets),
    "fixed size": lambda: (
        network(),
        tacit.PerSampleClip(0.5),
        lambda records, steps: FixedSizeSampler(records, 40, steps=steps),
    ),
    "shuffle": lambda: (
        network(),
        tacit.PerSampleClip(0.5),
        lambda records, steps: ShuffleSampler(records, 40, steps=steps),
    ),
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_and_sampler_goes_on_where_it_was(route, tmp_path, no_noise):
    def made(folder, *callbacks):
        model, query, sampler = ROUTES[route]()
        return trainer_on(
            folder,
            model,
            callbacks=callbacks,
            query=query,
            sampler=sampler(some_records(), 8),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
            moving_average=MovingAverage(0.8),
            evaluate_on=tacit.training.HeldOut(public(), every=2),
            budget=REPLACE,
        )

    def check(folder, *stops):
        for at in stops:
            trainer = made(folder, At(at, stop))
            run = trainer.fit(resume=folder if at != stops[0] else None)
            assert (run.steps, run.stopped) == (at, "asked to")
        trainer = made(folder)
        return trainer, trainer.fit(resume=folder if stops else None)

    whole, run = check(tmp_path / "whole")
    parts, resumed = check(tmp_path / "parts", 3, 4, 7)
    assert resumed.steps == run.steps == 8
    assert resumed.stopped == run.stopped == "plan complete"
    # A shuffled order is another one, so sums are rounded elsewhere.
    torch.testing.assert_close(weights(parts), weights(whole), rtol=0, atol=1e-5)
    if route != "shuffle":
        assert torch.equal(weights(parts), weights(whole))
    assert [e.step for e in resumed.history] == [2, 4, 6, 8]
    assert [e.metrics.loss for e in resumed.history] == pytest.approx(
        [e.metrics.loss for e in run.history], abs=1e-5
    )
    assert resumed.epsilon == run.epsilon
    assert "3 times, the last time at step 7; all charged" in resumed.notes[-1]
    query, other = parts.mechanism.query, whole.mechanism.query
    assert query.thresholds == other.thresholds
    if hasattr(query, "estimates"):
        assert query.estimates == other.estimates


OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "cosine"),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), "steps"),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), None),
    "NAdam": (lambda p: torch.optim.NAdam(p, lr=0.1), "one cycle"),
    "RAdam": (lambda p: torch.optim.RAdam(p, lr=0.1), "sequence"),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1), "lambda"),
    "Adamax": (lambda p: torch.optim.Adamax(p, lr=0.1), "warm restarts"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True), "cyclic"),
    "Rprop": (lambda p: torch.optim.Rprop(p, lr=0.01), "chained"),
    "Adadelta": (lambda p: torch.optim.Adadelta(p), None),
    "ASGD": (lambda p: torch.optim.ASGD(p, lr=0.1), None),
    "Adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.1), None),
    "groups": (
        lambda p: torch.optim.SGD([{"params": [w], "lr": 0.1 / (i + 1)} for i, w in enumerate(p)]),
        "cosine",
    ),
}
SCHEDULES = {
    None: lambda o: None,
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=9),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[4],
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_and_schedule_goes_on_where_it_was(kind, tmp_path, no_noise):
    make, schedule = OPTIMIZERS[kind]

    def made(folder, *callbacks):
        model = network()
        optimizer = make(model.parameters())
        return trainer_on(
            folder,
            model,
            callbacks=callbacks,
            sampler=everybody(some_records(), 8),
            optimizer=optimizer,
            scheduler=SCHEDULES[schedule](optimizer),
            budget=REPLACE,
        )

    whole = made(tmp_path / "whole")
    whole.fit()
    made(tmp_path / "parts", At(5, stop)).fit()
    resumed = made(tmp_path / "parts")
    resumed.fit(resume=tmp_path / "parts")
    assert torch.equal(weights(resumed), weights(whole))
    rates = [[group["lr"] for group in t.optimizer.param_groups] for t in (whole, resumed)]
    assert rates[0] == rates[1]


def test_frozen_entries_stay_frozen(tmp_path, no_noise):
    def made(folder, *callbacks):
        frozen, model = Sparsification(window=3, tolerance=2.0), network()
        query = tacit.PerSampleClip(0.5, frozen=frozen)
        more = {"sampler": everybody(some_records(), 8), "query": query, "budget": REPLACE}
        return frozen, trainer_on(folder, model, callbacks=[*callbacks, frozen], **more)

    kept, whole = made(tmp_path / "whole")
    whole.fit()
    made(tmp_path / "parts", At(4, stop))[1].fit()
    found, resumed = made(tmp_path / "parts")
    resumed.fit(resume=tmp_path / "parts")
    assert 0 < kept.share_frozen == found.share_frozen
    assert torch.equal(weights(resumed), weights(whole))


def test_batch_norm_goes_on_with_the_statistics_of_public_records(tmp_path, no_noise):
    def made(folder, *callbacks):
        model = batch_norm_network()
        return trainer_on(
            folder,
            model,
            callbacks=callbacks,
            statistics=tacit.PublicStatistics(public(), 4),
            evaluate_on=tacit.training.HeldOut(replace(public(), name="test"), every=2),
            budget=REPLACE,
            **with_statistics(8),
        )

    whole = made(tmp_path / "whole")
    whole.fit()
    made(tmp_path / "parts", At(3, stop)).fit()
    resumed = made(tmp_path / "parts")
    run = resumed.fit(resume=tmp_path / "parts")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name
    tacit.save_run(run, tmp_path / "saved")


def test_a_complete_run_is_given_back_with_what_it_released_at_its_end(tmp_path):
    """As after a kill between the last step and the saving of the run."""

    def made():
        statistics = tacit.ReleasedStatistics(some_records(), 4.0)
        return trainer_on(
            tmp_path, batch_norm_network(), statistics=statistics, budget=REPLACE,
            **with_statistics(8),
        )  # fmt: skip

    whole = made()
    run = whole.fit()
    resumed = made()
    again = resumed.fit(resume=tmp_path)
    assert (again.steps, again.epsilon, again.stopped) == (8, run.epsilon, "plan complete")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name
    tacit.save_run(again, tmp_path / "saved")


@pytest.mark.parametrize("resumed", [False, True])
def test_a_folder_that_another_process_trains_in_is_refused(resumed, tmp_path):
    folder = tmp_path / "x"
    if resumed:
        trainer_on(folder, callbacks=[At(3, stop)]).fit()
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with only_process(folder):
            os.write(told, b"x")
            signal.pause()
    os.read(ready, 1)
    with pytest.raises(CheckpointRefused, match="another process is training in"):
        trainer_on(folder).fit(resume=folder if resumed else None)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    run = trainer_on(folder).fit(resume=folder if resumed else None)
    assert (run.steps, run.charged_steps) == (8, 8)


class CountsSteps(tacit.Callback):
    def __init__(self):
        self.steps, self.mean = 0, None

    def on_step(self, trainer, step):
        self.steps += 1
        self.mean = (weights(trainer).mean(), float("inf"))

    def state_dict(self):
        return {"steps": self.steps, "mean": self.mean}

    def load_state_dict(self, state):
        self.steps, self.mean = state["steps"], state["mean"]


def test_a_users_own_callback_is_resumed_with_its_state(tmp_path):
    trainer_on(tmp_path, callbacks=[CountsSteps(), At(3, stop)]).fit()
    counter = CountsSteps()
    trainer_on(tmp_path, callbacks=[counter]).fit(resume=tmp_path)
    assert counter.steps == 8
    assert counter.mean[1] == float("inf")


def test_a_state_that_cannot_be_written_is_refused_before_anything_is_charged(tmp_path):
    class Holds(CountsSteps):
        def state_dict(self):
            return {"records": object()}

    with pytest.raises(ValueError, match=r"records' is a object, which a checkpoint cannot hold"):
        trainer_on(tmp_path, callbacks=[Holds()]).fit()
    assert charged_events(tmp_path) == 0


def charged_events(folder):
    return sum(run.steps for run in read_statement(folder / "ledger.sqlite").runs)


def test_steps_that_were_lost_are_charged_and_not_repeated(tmp_path, monkeypatch):
    used = Counter()
    stream = Randomness.stream

    def counted(self, purpose, *step):
        made = stream(self, purpose, *step)
        if purpose in ("noise", "sampling", "statistics"):
            used[purpose, made.key] += 1
        return made

    monkeypatch.setattr(Randomness, "stream", counted)
    with pytest.raises(OSError, match="as if"):
        trainer_on(tmp_path, callbacks=[At(6, fail)], every=4, seed=7).fit()
    run = trainer_on(tmp_path, every=4, seed=7).fit(resume=tmp_path)
    assert (run.steps, run.stopped) == (6, "budget")  # 8 planned, 5 and 6 were lost
    assert charged_events(tmp_path) == 8
    assert run.epsilon == run.plan.epsilon_of_count(8, 1e-3)
    note = "resumed from a checkpoint once at step 4; charged steps that are not part"
    assert any(note in n and "weights: 2; epsilon" in n for n in run.notes)
    assert set(used.values()) == {1}
    without = trainer_on(tmp_path, every=4).fit(resume=tmp_path)
    assert without.seeded  # most of its steps were


@pytest.mark.parametrize("sampler", ["poisson", "shuffle"])
def test_by_default_no_more_than_a_lease_is_lost(sampler, tmp_path):
    """300 steps: leases of three steps; 30 epochs of 10 steps: leases of one epoch."""
    made = everybody(some_records(), 300)
    if sampler == "shuffle":
        made = ShuffleSampler(some_records(), 4, steps=300)
    written = []

    class Watch(tacit.Callback):
        def on_step(self, trainer, step):
            written.append((tmp_path / FILE).stat().st_mtime_ns)
            if step == 31:
                trainer.stop()

    roomy = tacit.Budget(1000.0, 1e-3)
    budget = REPLACE if sampler == "shuffle" else roomy
    trainer_on(tmp_path, callbacks=[Watch()], sampler=made, budget=budget).fit()
    changes = [i + 1 for i in range(30) if written[i] != written[i + 1]]
    assert changes == ([*range(10, 31, 10)] if sampler == "shuffle" else [*range(3, 31, 3)])


@pytest.mark.parametrize(("every", "expected"), [(2, [2, 4, 6]), (5, [5])])
def test_a_checkpoint_is_written_every_so_many_steps(every, expected, tmp_path):
    written = []

    class Watch(tacit.Callback):
        def on_step(self, trainer, step):
            written.append((tmp_path / FILE).stat().st_mtime_ns)

    trainer_on(tmp_path, callbacks=[Watch()], every=every).fit()
    assert [i + 1 for i in range(7) if written[i] != written[i + 1]] == expected


@pytest.mark.usefixtures("usual_interrupts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_step_and_nothing_is_lost(number, tmp_path):
    send = At(3, lambda trainer: os.kill(os.getpid(), number))
    trainer = trainer_on(tmp_path, callbacks=[send], every=100)
    if number == signal.SIGTERM:
        with pytest.raises(SystemExit) as ended:
            trainer.fit()
        assert ended.value.code == 128 + signal.SIGTERM
    else:
        run = trainer.fit()
        assert (run.steps, run.stopped) == (3, "interrupted")
    assert charged_events(tmp_path) == 3
    run = trainer_on(tmp_path).fit(resume=tmp_path)
    assert (run.steps, run.stopped) == (8, "plan complete")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- what is refused -----------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path):
    """The folder of a run that was stopped at step 3, and its ledger before that."""
    copy = At(1, lambda trainer: shutil.copy(tmp_path / "ledger.sqlite", tmp_path / "old.sqlite"))
    trainer_on(tmp_path, callbacks=[copy, At(3, stop)]).fit()
    return tmp_path


def other_optimizer(model):
    return {"optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}


OTHERS = {
    "plan": lambda model: {"noise": tacit.Noise(2.5)},
    "data": lambda model: {
        "sampler": PoissonSampler(
            tacit.Records(*[torch.zeros(40, 4), torch.zeros(40).long()], 2, name="other"),
            0.25,
            steps=8,
            expected_batch_size=10,
        )
    },
    "kind of object": other_optimizer,
    "optimizer": lambda model: {"optimizer": torch.optim.SGD([*model.parameters()][:2], lr=0.1)},
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(what, stopped):
    model = network()
    trainer = trainer_on(stopped, model, **OTHERS[what](model))
    with pytest.raises(CheckpointRefused, match=f"of another {what}"):
        trainer.fit(resume=stopped)
    assert charged_events(stopped) == 3


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double(),
    ],
    ids=["layers", "sizes", "types"],
)
def test_a_checkpoint_of_another_model_is_refused(model, stopped):
    with pytest.raises(CheckpointRefused, match="of another model"):
        trainer_on(stopped, model).fit(resume=stopped)


def test_other_settings_of_the_optimizer_or_the_schedule_are_refused(stopped):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(CheckpointRefused, match="another kind of object"):
        trainer_on(stopped, model, optimizer=optimizer, scheduler=scheduler).fit(resume=stopped)


def test_a_checkpoint_of_another_ledger_is_refused(stopped):
    ledger = LedgerRun(stopped / "new.sqlite", "run")
    with pytest.raises(CheckpointRefused, match="another ledger or an older copy"):
        trainer_on(stopped, ledger=ledger).fit(resume=stopped)
    ledger = LedgerRun(stopped / "old.sqlite", "run")  # as it was before the checkpoint
    with pytest.raises(CheckpointRefused, match="another ledger or an older copy"):
        trainer_on(stopped, ledger=ledger).fit(resume=stopped)


def test_a_run_of_another_name_and_a_ledger_in_memory_are_refused(stopped):
    with pytest.raises(CheckpointRefused, match="is of run 'run', not 'mine'"):
        trainer_on(stopped, name="mine").fit(resume=stopped)
    with pytest.raises(ValueError, match="a checkpoint belongs to a ledger in a file"):
        trainer_on(stopped, ledger=None).fit()
    with pytest.raises(CheckpointRefused, match="has no checkpoint"):
        trainer_on(stopped).fit(resume=stopped / "elsewhere")
    assert trainer_on(stopped, name=None).fit(resume=stopped).steps == 8


def test_a_new_run_does_not_write_over_an_unfinished_one(stopped):
    with pytest.raises(CheckpointRefused, match=r"not complete, at step 3; resume it"):
        trainer_on(stopped).fit()
    assert trainer_on(stopped).fit(resume=stopped).steps == 8
    again = trainer_on(stopped, ledger=LedgerRun(stopped / "other.sqlite"))
    assert again.fit().steps == 8  # over that of a complete run


def test_an_older_checkpoint_costs_steps_and_nothing_else(stopped):
    """Putting back the checkpoint is no way to have steps twice."""
    old = (stopped / FILE).read_bytes()
    run = trainer_on(stopped).fit(resume=stopped)
    (stopped / FILE).write_bytes(old)
    again = trainer_on(stopped).fit(resume=stopped)
    assert (run.steps, again.steps, again.stopped) == (8, 3, "budget")
    assert again.epsilon == run.epsilon
    assert charged_events(stopped) == 8


def test_the_ledger_is_not_taken_further_than_its_budget(stopped):
    for _ in range(4):
        with suppress(OSError):
            trainer_on(stopped, callbacks=[At(5, fail)], every=5).fit(resume=stopped)
    with LedgerLog(stopped / "ledger.sqlite").transaction() as state:
        assert state.runs[1].charged == 8


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="every is 0"):
        Checkpoint(tmp_path, every=0)
    with pytest.raises(ValueError, match="minutes is nan"):
        Checkpoint(tmp_path, minutes=float("nan"))


def test_errors_are_of_the_kind_that_callers_catch():
    assert issubclass(CheckpointRefused, TacitError)
    assert issubclass(CheckpointRefused, ValueError)
    assert not issubclass(CheckpointRefused, PlanChanged)


def half_frozen(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    return model


def of_half_frozen(folder, model, *callbacks):
    checkpoint = Checkpoint(folder, every=2, with_frozen=False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    return trainer_on(
        folder, model, optimizer=optimizer, checkpoint=checkpoint, callbacks=callbacks
    )


def test_frozen_parameters_that_are_left_out_are_compared(tmp_path):
    with pytest.raises(OSError, match="as if the machine"):
        of_half_frozen(tmp_path, half_frozen(), At(5, fail)).fit()
    state = read_state(tmp_path / FILE)
    assert state["model"]["tensors"].keys() == {"2.weight", "2.bias"}
    assert state["model"]["frozen"].keys() == {"0.weight", "0.bias"}
    before = read_statement(tmp_path / "ledger.sqlite").runs[0].steps
    with pytest.raises(CheckpointRefused, match=r"other values in '0\.weight', which is frozen"):
        of_half_frozen(tmp_path, half_frozen(seed=1)).fit(resume=tmp_path)
    assert read_statement(tmp_path / "ledger.sqlite").runs[0].steps == before

    model = half_frozen(seed=1)
    model[0].load_state_dict(half_frozen()[0].state_dict())
    run = of_half_frozen(tmp_path, model).fit(resume=tmp_path)
    assert run.steps >= 6
    assert torch.equal(model[0].weight, half_frozen()[0].weight)


def test_a_frozen_parameter_that_changed_is_not_left_out(tmp_path):
    def change(trainer):
        with torch.no_grad():
            trainer.model[0].bias.add_(1.0)

    with pytest.raises(OSError, match="as if the machine"):
        of_half_frozen(tmp_path, half_frozen(), At(1, change), At(5, fail)).fit()
    assert read_state(tmp_path / FILE)["model"]["frozen"].keys() == {"0.weight"}
    model = half_frozen()
    of_half_frozen(tmp_path, model).fit(resume=tmp_path)
    assert torch.equal(model[0].bias, half_frozen()[0].bias + 1.0)
