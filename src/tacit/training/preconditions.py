"""What must hold before a run begins, and what is noted on the run where it does not.

Checks of the Trainer's arguments, of BatchNorm's statistics and of record ids; which runs have
trained a model's weights in this process; and the small objects that say what to evaluate on
(`HeldOut`, `Unprotected`) and what to charge (`LedgerRun`). `rehearsal` checks the records.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import dp_accounting as dpa
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tacit.budget import Budget, Relation
from tacit.errors import MissingStatistics
from tacit.ledger import Ledger
from tacit.noise import Noise
from tacit.queries.batch_clip import BatchClip
from tacit.queries.bounded_gradient import GradientQuery, trainable
from tacit.queries.record_overlap import require_public
from tacit.ranks import Ranks
from tacit.records import Records
from tacit.sampling.mini_sets import MiniSets
from tacit.sampling.sampler import Sampler
from tacit.sampling.scheme import whole_number
from tacit.statistics.running_statistics import PublicStatistics, ReleasedStatistics
from tacit.statistics.tracking import unfrozen_norms

ROW_NUMBERS = (
    "mini-sets are formed by row number, since the records have no ids: epsilon holds for a record "
    "that is missing while all others keep their numbers, and not for a table without one row; "
    "give record_ids, or a budget for replace-one"
)


def sets_by_row_number(sampler: Sampler, relation: Relation) -> bool:
    """Whether removing a row would put all later ones into other mini-sets."""
    by_id = isinstance(sampler.scheme, MiniSets)
    return by_id and sampler.records.row_numbered and relation is Relation.ADD_OR_REMOVE_ONE


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Raise if the optimizer holds none of the model's trainable parameters.

    Returns a note if it holds only some: the gradients of the others are released too, and unused.
    """
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = trainable(model)
    if not parameters:
        raise ValueError(
            "all parameters of the model are frozen (requires_grad is False), so that nothing "
            "would be trained; unfreeze some: model.requires_grad_(True), or of one layer"
        )
    left_out = [name for name, p in parameters.items() if id(p) not in optimized]
    if not left_out:
        return None
    if len(left_out) == len(parameters):
        raise ValueError(
            f"optimizer holds none of the model's {len(parameters)} trainable parameters, so that "
            "no step would change the model; make it from model.parameters() of this model (what "
            "make_trainable and lipschitz_twin return is a copy)"
        )
    return (
        f"the optimizer leaves out {len(left_out)} of the model's {len(parameters)} trainable "
        "parameters, which stay as they were"
    )


# ---- the Trainer's arguments ---------------------------------------------------------------------


def check_on_ranks(
    ranks: Ranks,
    model: nn.Module,
    query: GradientQuery,
    optimizer: torch.optim.Optimizer,
    seed: int | None,
) -> None:
    """Raise ValueError unless all ranks train the same: model, query, optimizer and seed."""
    if getattr(query, "frozen", None) is not None and ranks.shards(model):
        raise ValueError(
            "entries of a sharded model cannot be frozen one by one (Sparsification); leave that "
            "out, or do not shard the model"
        )
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    shapes = [(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]
    facts = shapes, repr(query), type(optimizer).__name__, groups, seed
    ranks.require_same(facts, "their model, query, optimizer or seed")


def check_arguments(given: dict[str, Any]) -> None:
    """Raise ValueError for the first argument of the Trainer that is not of its kind.

    A class instead of an instance, a string or a number, arguments in another order.
    """
    for name, (is_one, wanted) in _KINDS.items():
        value = given[name]
        if isinstance(value, type) and name != "callbacks":
            raise ValueError(
                f"{name} is the class {value.__name__}, and an instance is needed; give {wanted}"
            )
        if not (is_one(value) or (value is None and name in _OPTIONAL)):
            shown = repr(value) if isinstance(value, str | int | float | tuple) else "an object"
            raise ValueError(f"{name} is {shown} ({type(value).__name__}); give {wanted}")
    for callback in given["callbacks"] or ():
        missing = [name for name in _CALLED if not callable(getattr(callback, name, None))]
        if missing or isinstance(callback, type):
            raise ValueError(
                f"callbacks holds {callback!r}, which has no method {missing[0] if missing else ''}"
                "; give instances of a class that derives from tacit.training.Callback"
            )
    _check_model(given["model"])
    _check_optimizer(given["optimizer"], given["model"])
    _check_scheduler(given["scheduler"], given["optimizer"], given["sampler"].steps)
    if given["mesh"] is not None and isinstance(given["statistics"], ReleasedStatistics):
        raise ValueError(
            "ReleasedStatistics are computed on one rank; on several give PublicStatistics, or "
            "leave out mesh"
        )


def _is_query(value: object) -> bool:
    return callable(value) and hasattr(value, "unit")


def _is_whole(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_scheduler(value: object) -> bool:
    return callable(getattr(value, "step", None)) and not isinstance(value, torch.optim.Optimizer)


_STATISTICS = "PublicStatistics(public, set_size) or ReleasedStatistics(records, noise_multiplier)"
# How each argument is recognised, and an example that works.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda v: isinstance(v, nn.Module), "a torch.nn.Module, such as nn.Linear(8, 2)"),
    "loss": (
        lambda v: callable(v) and not _is_query(v),
        "a loss such as tacit.losses.CrossEntropy(), or a function of (outputs, targets)",
    ),
    "query": (_is_query, "a gradient query, such as tacit.PerSampleClip(max_norm=1.0)"),
    "sampler": (
        lambda v: isinstance(v, Sampler),
        "a sampler of Tacit's, such as tacit.PoissonSampler(records, expected_batch_size=64, "
        "steps=100): the sampling is part of the guarantee, and a DataLoader draws otherwise",
    ),
    "optimizer": (
        lambda v: isinstance(v, torch.optim.Optimizer)
        or (hasattr(v, "param_groups") and callable(getattr(v, "step", None))),
        "an optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    "budget": (lambda v: isinstance(v, Budget), "tacit.Budget(epsilon=3.0, delta=1e-5)"),
    "noise": (lambda v: isinstance(v, Noise), "tacit.Noise(multiplier), or leave it out"),
    "scheduler": (
        _is_scheduler,
        "a learning-rate scheduler, such as torch.optim.lr_scheduler.StepLR(optimizer, 100)",
    ),
    "moving_average": (lambda v: hasattr(v, "swap"), "tacit.training.MovingAverage(decay=0.99)"),
    "statistics": (lambda v: hasattr(v, "note") and hasattr(v, "apply"), _STATISTICS),
    "callbacks": (lambda v: isinstance(v, list | tuple | set), "a list of callbacks"),
    "ledger": (
        lambda v: isinstance(v, LedgerRun | Ledger | str | os.PathLike),
        "the path of a ledger's file, a tacit.Ledger or a LedgerRun",
    ),
    "mesh": (
        lambda v: isinstance(v, DeviceMesh),
        'torch.distributed.device_mesh.init_device_mesh("cuda", (world_size,))',
    ),
    "seed": (_is_whole, "a whole number, or leave it out"),
}  # fmt: skip
_OPTIONAL = (
    "noise", "scheduler", "moving_average", "statistics", "callbacks", "ledger", "mesh", "seed"
)  # fmt: skip
_CALLED = ("on_begin", "on_step", "on_evaluation", "on_end", "on_error")


def _check_model(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} of the model has no shape yet, since its layer is lazy; run "
                "one batch of zeros through the model first, and then make the optimizer"
            )
        if parameter.device.type == "meta":
            raise ValueError(
                f"parameter {name!r} of the model is on the meta device, where it has no values; "
                "load or make the weights first: model.to_empty(device='cpu') and "
                "model.load_state_dict(weights)"
            )
        if not bool(torch.isfinite(parameter.detach()).all()):
            raise ValueError(
                f"parameter {name!r} of the model holds NaN or infinite numbers, so that no "
                "record would contribute to a gradient; make the model anew, or load weights that "
                "are finite"
            )


def _needs(method: Callable[..., Any]) -> list[str]:
    """The arguments that a call must give."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # of a compiled extension
        return []
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in named]


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    kind = type(optimizer).__name__
    if "closure" in _needs(optimizer.step):
        raise ValueError(
            f"optimizer is {kind}, whose steps evaluate the loss several times through a closure, "
            "and a private step releases one gradient; use torch.optim.SGD or torch.optim.Adam"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "optimizer is SparseAdam, which takes sparse gradients, and noise makes every gradient "
            "dense; use torch.optim.Adam"
        )
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in held if id(p) not in own]
    if foreign and len(foreign) < len(held):
        raise ValueError(
            f"optimizer holds {len(foreign)} parameters that are not the model's, and no gradient "
            "would be released for them; make it from model.parameters() of this model"
        )


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    if scheduler is None:
        return
    kind = type(scheduler).__name__
    if needed := _needs(scheduler.step):
        raise ValueError(
            f"scheduler is {kind}, whose step needs {needed[0]!r}, and the Trainer gives it none; "
            "use a schedule of the step alone, such as "
            "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"scheduler is a {kind} of another optimizer, so that this one's learning rate would "
            f"never change; make it of the same optimizer: {kind}(optimizer, ...)"
        )
    total, done = getattr(scheduler, "total_steps", None), getattr(scheduler, "last_epoch", 0)
    if isinstance(total, int) and total - done < steps:
        raise ValueError(
            f"scheduler is a {kind} of {total} steps, {total - done} of which are left, and the "
            f"sampler has {steps}; give total_steps={steps + done}"
        )


UNPROTECTED_METRICS = "the metrics are of Unprotected records: epsilon does not cover them"

TRAINING_METRICS = (
    "most of the evaluated records equal training records: epsilon does not cover what their "
    "metrics show; evaluate on records that were held out"
)


@dataclass(frozen=True)
class HeldOut:
    """Held-out records to evaluate on during a run. The training records are refused.

    `every` is the number of steps between evaluations, by default a twentieth of the run. The
    guarantee does not cover these records: what is read off them is released without noise.
    """

    records: Records
    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            whole_number("every", self.every, least=1)


@dataclass(frozen=True)
class Unprotected(HeldOut):
    """Records to evaluate on although they may be training records, as in a test or a study.

    Their accuracy and loss are released without noise, so ε does not cover them; the run says so.
    """


TRAINED_OUTSIDE_LEDGER = (
    "these weights were trained before, by a run that this epsilon does not count; if the records "
    "are the same, give both runs one ledger"
)
TRAINED_BY_OTHER_RUN = (
    "these weights were trained before, by another run of this ledger: epsilon is this run's "
    "alone, and the ledger's statement counts both"
)


DIVERGED = (
    "the weights of the finished model are not all finite: the run diverged; give a smaller "
    "learning rate, or a schedule that begins with one"
)
RESUMED = (
    "this run was charged for steps before, and was not resumed from a checkpoint: epsilon counts "
    "those steps too; the weights, optimizer and schedule went on from what this process was given"
)


@dataclass(frozen=True)
class LedgerRun:
    """The run of a ledger that training is charged to.

    `ledger` is a file (shared by all runs over the same data), an open `Ledger`, or None for one
    in memory. A run of the same `name` is continued: it has the steps that are left of it. A
    ledger stores no weights: a checkpoint does (`fit(resume=...)`). `prelude` holds what was
    released before training, as the functions of `tacit.data` return it: it is planned and charged
    with the run. To continue a run with another release in the place of the one that was charged is
    refused.

        Trainer(..., ledger=LedgerRun("ledger.sqlite", name="scaled", prelude=(event,)))
    """

    ledger: Ledger | str | os.PathLike[str] | None = None
    name: str | None = None
    prelude: tuple[dpa.DpEvent, ...] = ()


def require_ledger_file(given: Ledger | str | os.PathLike[str] | None) -> None:
    """A checkpoint needs a ledger that outlives the process."""
    path = given.path if isinstance(given, Ledger) else given
    if path is None:
        raise ValueError(
            "a checkpoint belongs to a ledger in a file, which keeps what was charged when the "
            "process ends; give Trainer(ledger='ledger.sqlite')"
        )


def ledger_key(given: Ledger | str | os.PathLike[str] | None) -> Hashable:
    """The same for one ledger: its file, or itself in memory. None is a new ledger each time."""
    path = given.path if isinstance(given, Ledger) else given
    if path is not None:
        return os.path.realpath(path)
    return weakref.ref(given) if isinstance(given, Ledger) else object()


_RUNS: weakref.WeakKeyDictionary[nn.Module, set[tuple[Hashable, int]]] = weakref.WeakKeyDictionary()


def record_run(model: nn.Module, ledger: Hashable, run: int) -> None:
    """Note that this run of this ledger trains the model's weights."""
    for module in _with_weights(model):
        _RUNS.setdefault(module, set()).add((ledger, run))


def recorded_runs(model: nn.Module) -> set[tuple[Hashable, int]]:
    """The ledgers and runs that have trained some of the model's weights in this process.

    Copies of a model are not known.
    """
    return {pair for module in _with_weights(model) for pair in _RUNS.get(module, ())}


def _with_weights(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with weights of their own: a model may be wrapped, or built around them, anew."""
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield module


Statistics = PublicStatistics | ReleasedStatistics


def check_statistics(
    model: nn.Module, statistics: Statistics | None, private: Records, query: GradientQuery
) -> None:
    """Raise unless evaluation will have statistics to normalise by, and they may be known.

    Training keeps none, so a BatchNorm that trained would end with its initial mean 0 and variance
    1, which have nothing to do with its inputs. Queries other than BatchClip refuse such a model
    themselves.
    """
    norms = unfrozen_norms(model)
    if statistics is None and norms and isinstance(query, BatchClip):
        name, norm = next(iter(norms.items()))
        raise MissingStatistics(
            f"module {name!r} ({type(norm).__name__}) normalises by running statistics in "
            "evaluation, and private training keeps none. Give the Trainer "
            "statistics=PublicStatistics(public, set_size) to have them from public records, or "
            "statistics=ReleasedStatistics(records, noise_multiplier) to have them with noise that "
            "is charged, or convert the network: make_trainable(model)"
        )
    if statistics is not None and not norms:
        raise ValueError(
            f"{type(statistics).__name__} was given, and the model has no BatchNorm with running "
            "statistics in training mode; leave statistics out"
        )
    if isinstance(statistics, PublicStatistics):
        require_public(statistics.public, private)
    elif isinstance(statistics, ReleasedStatistics):
        statistics.check(model)
