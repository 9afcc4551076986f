"""Checkpoints: the state of a run on disk, whole or not at all, and how a run is resumed.

A checkpoint is one file, `checkpoint.safetensors`: tensors, and beside them JSON that says where
each belongs. It is written under another name, synced, and renamed, as the ledger's files are.
Reading it runs no code: it holds numbers, texts and tensors and nothing else, and a SHA-256 over
all of them, so a damaged one is noticed.

**What it holds is private already.** Weights, the optimizer's state, averages and clipping
constants are computed from released gradients: post-processing. Metrics in its history are of
held-out records, which no guarantee covers, as in run.json. It holds no record, no row that was
drawn, no sum without noise, no digest of the data, and no key of the random stream.

**Nothing is drawn twice.** The ledger charges before noise is drawn, so it may be ahead of a
checkpoint, never behind. What it is ahead by may have been seen. It stays charged, and is not
repeated: a resumed run is another attempt, with noise and batches of its own, also with a seed.
It has the events that are left of its plan. By default a checkpoint is written whenever a lease is
used up, before the next one is charged, so that a kill loses one lease at most.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from tacit.errors import CheckpointRefused, TacitError
from tacit.ledger import RunPosition
from tacit.losses import Task
from tacit.sampling.scheme import whole_number
from tacit.statistics.tracking import origins_of, refuse_private_statistics, set_origin
from tacit.torch_internals import unsharded_class
from tacit.training.callbacks import Evaluation
from tacit.training.evaluation import Metrics
from tacit.training.frozen_weights import other_than
from tacit.training.state_file import CHECKPOINT as FILE
from tacit.training.state_file import read_state, write_state

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer

_MINUTES = 10.0  # between checkpoints within a long lease


@runtime_checkable
class Stateful(Protocol):
    """What has a state that a run is resumed with, as PyTorch's optimizers and schedulers have.

    A query, loss, sampler or callback with these two methods is part of every checkpoint. The
    state may hold numbers, texts, None and tensors, in lists, tuples and dicts. It is written
    to disk, so it must not hold anything that was not released.
    """

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True)
class Checkpoint:
    """Where the state of a run is kept, and how often it is written.

    By default it is written whenever a lease of the ledger is used up, which is each percent of
    the run, and after ten minutes within a longer lease. A kill then loses one lease at most: at
    most so many events are charged and not part of the weights.

    Args:
        folder: The folder of the run. It has one checkpoint, which the next one replaces.
        every: Write after so many steps instead. A lease is then no longer than that, so a kill
            loses `every` steps at most if they are fewer than a lease, else a lease more.
        minutes: Write after so many minutes instead; a kill loses the steps since then, and the
            rest of a lease. Of `every` and `minutes`, what is due first.
        with_frozen: Write frozen parameters too. Without them the file is small where an adapter
            trains beside a large model, and a run is resumed with a model that has the same ones:
            digests of them are compared.

    Example:
        >>> trainer = tacit.Trainer(..., ledger="ledger.sqlite", checkpoint=Checkpoint("runs/x"))
        >>> run = trainer.fit()  # killed; then, in a new process and with the same arguments:
        >>> run = trainer.fit(resume="runs/x")
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    minutes: float | None = None
    with_frozen: bool = True

    def __post_init__(self) -> None:
        if self.every is not None:
            whole_number("every", self.every, least=1)
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"minutes is {self.minutes}; give a number above 0")

    @property
    def file(self) -> Path:
        return Path(self.folder) / FILE

    def due(self, steps: int, seconds: float, lease_used_up: bool) -> bool:
        """Whether to write one after so many steps of this attempt, so long after the last."""
        if self.every is not None and steps % self.every == 0:
            return True
        if self.every is None and self.minutes is None:
            return lease_used_up or seconds >= 60 * _MINUTES
        return self.minutes is not None and seconds >= 60 * self.minutes


@dataclass
class Progress:
    """How far a run is. `start` is the step that this attempt began at.

    `resumed` has, for each time that the run was resumed, the step, and the events that had been
    charged after it. `ended` says why a run is complete; it has its final weights then.
    """

    step: int = 0
    start: int = 0
    seconds: float = 0.0
    ended: str | None = None
    seeded: bool = False  # in any attempt
    resumed: list[tuple[int, int]] = field(default_factory=list)
    history: list[Evaluation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # of how the run began
    begun: float = field(default_factory=time.perf_counter)
    written: float = field(default_factory=time.perf_counter)

    def seconds_now(self) -> float:
        return self.seconds + time.perf_counter() - self.begun

    def note(self, units: str) -> list[str]:
        """What a reader of the run must know about interruptions; empty without any."""
        if not self.resumed:
            return []
        count, lost = len(self.resumed), sum(events for _, events in self.resumed)
        times = "once" if count == 1 else f"{count} times, the last time"
        kept = f"all charged {units} are part of the weights"
        if lost:
            kept = f"charged {units} that are not part of the weights: {lost}; epsilon counts them"
        return [f"resumed from a checkpoint {times} at step {self.resumed[-1][0]}; {kept}"]


@dataclass(frozen=True)
class StoredState:
    """A checkpoint that was read, and not yet compared with a trainer."""

    file: Path
    position: RunPosition
    progress: Progress
    described: dict[str, Any]
    model: dict[str, Any]
    parts: dict[str, Any]


# ---- writing and reading a run -------------------------------------------------------------------


def save_state(
    checkpoint: Checkpoint, trainer: Trainer, position: RunPosition, progress: Progress
) -> None:
    """Write the state of a run between two steps, in the place of the checkpoint before."""
    refuse_private_statistics(trainer.model)
    ranks = trainer.ranks
    with trainer.whole_model():
        frozen = {} if trainer.frozen is None else trainer.frozen.unchanged(trainer.model)
        every = _tensors_of(trainer.model).items()
        tensors = {name: t.detach() for name, t in every if name not in frozen}
    parts = {name: part.state_dict() for name, part in stateful_parts(trainer).items()}
    progress.written = time.perf_counter()
    state = {
        "ledger": asdict(position),
        "progress": {
            "step": progress.step,
            "seconds": progress.seconds_now(),
            "ended": progress.ended,
            "seeded": progress.seeded,
            "resumed": progress.resumed,
            "notes": progress.notes,
            "history": [
                {"step": e.step, "epsilon": e.epsilon, "metrics": _plain_metrics(e.metrics)}
                for e in progress.history
            ],
        },
        "described": describe(trainer),
        "model": {
            "tensors": tensors,
            "frozen": frozen,
            "extra": _extra_state_of(trainer.model),
            "origins": origins_of(trainer.model),
        },
        "parts": parts if ranks is None else ranks.whole(parts),
    }
    if ranks is None:
        write_state(checkpoint.file, state)
    else:  # whole tensors, which any number of ranks can go on from
        ranks.on_first(lambda: write_state(checkpoint.file, state))


def _plain_metrics(metrics: Metrics) -> dict[str, Any]:
    return {**asdict(metrics), "task": None if metrics.task is None else metrics.task.value}


def _metrics_of(stored: dict[str, Any]) -> Metrics:
    task = stored["task"]
    return Metrics(**{**stored, "task": None if task is None else Task(task)})


def read_checkpoint(folder: str | os.PathLike[str]) -> StoredState:
    """The checkpoint in `folder`. Raises CheckpointRefused if it is missing or damaged."""
    file = Path(folder) / FILE
    if not file.is_file():
        raise CheckpointRefused(
            f"{folder} has no {FILE}; give the folder that Checkpoint(folder) wrote to, or start "
            "the run again"
        )
    with _refusing(file, "cannot be read", "start the run again, or use a backup of the file"):
        state = read_state(file)
        if not isinstance(state, dict):
            raise TypeError("it holds no state of a run")
        stored, position = state["progress"], RunPosition(**state["ledger"])
        progress = Progress(
            step=whole_number("step", stored["step"], least=0),
            start=stored["step"],
            seconds=float(stored["seconds"]),
            ended=stored["ended"],
            seeded=bool(stored["seeded"]),
            resumed=[(int(step), int(lost)) for step, lost in stored["resumed"]],
            notes=list(map(str, stored["notes"])),
            history=[
                Evaluation(int(e["step"]), float(e["epsilon"]), _metrics_of(e["metrics"]))
                for e in stored["history"]
            ],
        )
        hints = {"run": int, "events": int, "name": str, "ledger": str, "head": str, "attempt": int}
        if any(type(getattr(position, name)) is not kind for name, kind in hints.items()):
            raise TypeError(f"its place on the ledger is {position}")
        if not all(0 <= n < 2**63 for n in (position.run, position.events, position.attempt)):
            raise ValueError(f"its place on the ledger is {position}")
        keys = "described", "model", "parts"
        return StoredState(file, position, progress, *(dict(state[key]) for key in keys))


def require_free(checkpoint: Checkpoint) -> None:
    """Raise CheckpointRefused if a new run would write over the checkpoint of an unfinished one."""
    if not checkpoint.file.exists():
        return
    progress = read_checkpoint(checkpoint.folder).progress
    if progress.ended is None:
        raise CheckpointRefused(
            f"{checkpoint.file} is of a run that is not complete, at step {progress.step}; "
            f"resume it (fit(resume={str(checkpoint.folder)!r})), or give Checkpoint another folder"
        )


def check_state(stored: StoredState, trainer: Trainer) -> None:
    """Raise CheckpointRefused unless the checkpoint is of this plan, model, optimizer and data."""
    now, then = describe(trainer), stored.described
    for what in now:
        if then.get(what) == now[what]:
            continue
        difference = _first_difference(then.get(what), now[what])
        raise CheckpointRefused(
            f"the checkpoint {stored.file} is of another {what} ({difference}); resume with the "
            f"{what} that the run began with, or start another run"
        )
    if stored.progress.step > trainer.sampler.steps:
        raise CheckpointRefused(f"the checkpoint {stored.file} is past the end of its plan")
    with _refusing(stored.file, "cannot be read", "start another run"), trainer.whole_model():
        other = other_than(stored.model.get("frozen", {}), trainer.model)
    if other is not None:
        raise CheckpointRefused(
            f"the checkpoint {stored.file} is of a model with other values in {other!r}, which is "
            "frozen; resume with the model that the run began with, or start another run"
        )


def restore_state(stored: StoredState, trainer: Trainer) -> None:
    """Put the state into the trainer's model, optimizer and the rest. Call `check_state` first."""
    device = next(trainer.model.parameters()).device
    remedy = "give the objects that the run began with, or start another run"
    with _refusing(stored.file, "does not fit", remedy):
        with trainer.whole_model(), torch.no_grad():
            tensors = _tensors_of(trainer.model)
            values = stored.model["tensors"]
            for name in stored.model.get("frozen", {}):  # `check_state` has compared them
                tensors.pop(name)
            if {n: v.shape for n, v in values.items()} != {n: t.shape for n, t in tensors.items()}:
                raise ValueError("its tensors are not those of the model")
            for name, value in values.items():
                tensors[name].copy_(value)
        modules = dict(trainer.model.named_modules())
        for name, extra in stored.model["extra"].items():
            modules[name].set_extra_state(extra)
        for name, origin in stored.model["origins"].items():
            set_origin(modules[name], origin)
        for name, part in stateful_parts(trainer).items():
            state = stored.parts[name]
            if name in ("optimizer", "scheduler"):
                _require_same_keys(name, part.state_dict(), state)
                if trainer.ranks is not None and name == "optimizer":
                    state = trainer.ranks.optimizer_state(trainer.optimizer, state)
            elif trainer.ranks is not None:
                state = trainer.ranks.shared_out(
                    _on_device(state, device), part.state_dict(), trainer.model
                )
            else:  # PyTorch puts an optimizer's state where it belongs
                state = _on_device(state, device)
            part.load_state_dict(state)
        _require_states_fit(trainer)


def parts_of(trainer: Trainer) -> dict[str, object]:
    """The objects of a run beside its model, by name. A callback counts if it has a state."""
    mechanism = trainer.mechanism
    parts: dict[str, object] = {
        "optimizer": trainer.optimizer,
        "scheduler": trainer.scheduler,
        "moving average": trainer.moving_average,
        "query": mechanism.query,
        "mechanism": mechanism,
        "sampler": trainer.sampler,
        "loss": trainer.loss,
    }
    count: Counter[str] = Counter()
    for callback in trainer.callbacks:
        if isinstance(callback, Stateful):
            kind = _kind(callback)
            count[kind] += 1
            parts[f"callback {kind} {count[kind]}"] = callback
    return {name: part for name, part in parts.items() if part is not None}


def stateful_parts(trainer: Trainer) -> dict[str, Stateful]:
    parts = parts_of(trainer)
    return {name: part for name, part in parts.items() if isinstance(part, Stateful)}


def describe(trainer: Trainer) -> dict[str, Any]:
    """What a run is recognised by, apart from its ledger. Of the records, only what is declared."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    groups = trainer.optimizer.param_groups
    records = trainer.sampler.records
    return {
        "plan": json.loads(trainer.plan.to_json()),
        "data": {
            "name": records.name,
            "shape": str(records.shape),
            "classes": list(records.class_names or ()) or records.num_classes,
            "public size": records.public_size,
            "batch size": trainer.sampler.expected_batch_size,
        },
        "model": {
            "modules": {name: _kind(module) for name, module in trainer.model.named_modules()},
            "tensors": {
                name: f"{tensor.dtype} {tuple(tensor.shape)}"
                for name, tensor in _tensors_of(trainer.model).items()
            },
        },
        "optimizer": [[names.get(id(p), "") for p in group["params"]] for group in groups],
        "kind of object": {name: _kind(part) for name, part in parts_of(trainer).items()},
    }


def _kind(part: object) -> str:
    return unsharded_class(part).__qualname__


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that a state dict leaves out; a shared one once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _extra_state_of(model: nn.Module) -> dict[str, Any]:
    own = nn.Module.get_extra_state
    modules = model.named_modules()
    return {name: m.get_extra_state() for name, m in modules if type(m).get_extra_state is not own}


def _first_difference(then: Any, now: Any, place: str = "") -> str:
    """Where two descriptions differ first, in a few words."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in (*then, *(key for key in now if key not in then)):
            if then.get(key) != now.get(key):
                return _first_difference(then.get(key), now.get(key), str(key) or "the whole")
    said = f"{place}: " if place else ""
    return f"{said}{str(then)[:80]} there, {str(now)[:80]} here"


def _require_same_keys(what: str, own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """A scheduler takes any attribute from its state, and an optimizer any hyperparameter."""
    groups = own.get("param_groups", ()), state.get("param_groups", ())
    pairs = [(own, state), *zip(*groups, strict=True)]
    if any(mine.keys() != theirs.keys() for mine, theirs in pairs):
        raise ValueError(f"the {what} has other settings than the one that was saved")


def _require_states_fit(trainer: Trainer) -> None:
    """Refuse what an optimizer and an average take as their state and cannot use afterwards."""
    tensor_of: dict[str, bool] = {}
    for state in trainer.optimizer.state.values():
        for key, value in state.items():
            is_tensor = isinstance(value, Tensor)
            if value is not None and tensor_of.setdefault(key, is_tensor) != is_tensor:
                raise ValueError(f"{key!r} of the optimizer is a tensor for some parameters only")
    if trainer.moving_average is None:
        return
    average = trainer.moving_average.state_dict()["average"]
    shapes = {name: p.shape for name, p in trainer.model.named_parameters()}
    if average and {name: getattr(v, "shape", None) for name, v in average.items()} != shapes:
        raise ValueError("its moving average is not one of the model's parameters")


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_on_device(v, device) for v in value)
    if isinstance(value, dict):
        return {k: _on_device(v, device) for k, v in value.items()}
    return value


@contextmanager
def _refusing(file: Path, why: str, remedy: str) -> Iterator[None]:
    """Whatever the content of a file may raise is one error that names it."""
    try:
        yield
    except TacitError:
        raise
    except (
        *(SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError),
        *(ArithmeticError, RecursionError, RuntimeError, MemoryError),
    ) as error:
        said = (str(error).splitlines() or [""])[0]
        raise CheckpointRefused(
            f"the checkpoint {file} {why} ({type(error).__name__}: {said}); {remedy}"
        ) from error


# ---- between steps -------------------------------------------------------------------------------


@contextmanager
def signals_between_steps() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are noted, in the list, and wait until the step is done.

    A second one ends the run at once. Outside the main thread nothing changes.
    """
    caught: list[int] = []

    def note(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours = {n: h for n, h in before.items() if h in (signal.SIG_DFL, signal.default_int_handler)}
    for number in ours:  # a handler of the user's own stays
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
