"""What must hold before a run begins, and what is noted on the run where it does not.

Checks of the optimizer, of BatchNorm's statistics and of record ids; which runs have trained a
model's weights in this process; and the small objects that say what to evaluate on (`HeldOut`,
`Unprotected`) and what to charge (`LedgerRun`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import dp_accounting as dpa
import torch
from torch import nn

from tacit.budget import Relation
from tacit.errors import MissingStatistics
from tacit.ledger import Ledger
from tacit.queries.batch_clip import BatchClip
from tacit.queries.bounded_gradient import GradientQuery, trainable
from tacit.queries.record_overlap import require_public
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
