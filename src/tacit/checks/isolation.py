"""The report on isolation: whether records stay apart in a model, and the refusals if they do not.

`tacit.engines.gradient_plan` makes the report from one forward and one backward pass in which every
number carries the label of its record. It is a proof for the operators that ran, whatever values
the records hold. Each refusal names the operator, the line of the model's code and a remedy
that works. PyTorch's own modules that mix records, keep statistics or rewrite weights are refused
by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tacit.errors import MixesRecords
from tacit.torch_internals import BatchNorm, InstanceNorm

_ALONE = (
    "or, if the model only pads or branches per batch, give engine=tacit.engines.PerRecord(), "
    "which runs each record as a batch of one"
)


@dataclass(frozen=True)
class Event:
    """Something that an operator did to private numbers, and the line of code that called it."""

    operator: str
    where: str
    phase: str = "forward"

    def __str__(self) -> str:
        return f"{self.operator} at {self.where}"


@dataclass(frozen=True)
class IsolationReport:
    """The result of a pass with labelled records. Empty tuples prove that records stay apart.

    Attributes:
        meetings: operators by which a loss depends on several records.
        value_reads: operators by which Python read a value of a record.
        written: buffers and parameters that hold values of records after the pass.
        unknown: operators that shadow memory has no rule for.
        selections: operators that select rows by value: how many there are is private.
        reorders: operators that put rows in an order that may differ in the next pass.
        stale_reads: operators that read what an earlier pass has left behind.
    """

    meetings: tuple[Event, ...] = ()
    value_reads: tuple[Event, ...] = ()
    written: tuple[tuple[str, Event | None], ...] = ()
    unknown: tuple[Event, ...] = ()
    selections: tuple[Event, ...] = ()
    reorders: tuple[Event, ...] = ()
    stale_reads: tuple[Event, ...] = ()

    @property
    def refutes(self) -> bool:
        """Whether the report shows a violation. The need to run record by record is none."""
        meetings = self.meetings and not self.alone
        return bool(meetings or self.value_reads or self.written)

    @property
    def proves(self) -> bool:
        return not self.refutes and not self.alone

    @property
    def alone(self) -> str | None:
        """Why each record must run alone, or None.

        After an operator without a rule, labels are too coarse to prove anything. Where rows are
        selected by value, Python sees their number, which no label covers.
        """
        if self.unknown:
            first = self.unknown[0]
            return f"shadow memory has no rule for {first.operator} ({first.where})"
        if self.selections:
            first = self.selections[0]
            return f"{first.operator} selects rows by value, or may raise ({first.where})"
        return None


def require_isolation(isolation: IsolationReport, model: nn.Module) -> None:
    """Raise MixesRecords if records meet, if Python reads their values, or if any stay behind."""
    name = type(model).__name__
    require_no_writes(isolation, model)
    if isolation.stale_reads and isolation.refutes:
        refuse_stateful(isolation.stale_reads[0], model)
    if isolation.value_reads:
        raise MixesRecords(
            f"{name} lets Python read values of the batch ({isolation.value_reads[0]}), so what it "
            "computes for one record may depend on the others. Keep the decision in tensors "
            f"(torch.where, a mask, a fixed length), {_ALONE}"
        )
    if isolation.alone or not isolation.meetings:
        return
    event = isolation.meetings[0]
    where = f"records meet inside {name}: {event}"
    if "batch_norm" in event.operator:
        raise MixesRecords(
            f"{where} mixes records through batch statistics, so no record's share of the gradient "
            "is bounded; replace BatchNorm by GroupNorm (tacit.make_trainable(model) does), keep "
            "it in evaluation mode with statistics from public data, or train with tacit.BatchClip"
        )
    raise MixesRecords(
        f"{where} mixes them in the {event.phase} pass, so no record's share of the gradient is "
        "bounded. Use operations within each record (along another dimension than the records'), "
        f"{_ALONE}"
    )


def require_no_writes(isolation: IsolationReport, model: nn.Module) -> None:
    """Raise MixesRecords if a buffer or a parameter holds a value of a record after the pass."""
    for name, event in isolation.written[:1]:
        where = "" if event is None else f" ({event})"
        raise MixesRecords(
            f"{type(model).__name__} writes values of records into {name!r}{where}, which would be "
            "saved without noise; keep such a state out of training, or in evaluation mode, and "
            "write what depends on weights alone in a callback, after the step"
        )


def refuse_stateful(event: Event | None, model: nn.Module) -> None:
    """Raise MixesRecords: what an earlier pass left behind is in the losses of a later one."""
    where = "" if event is None else f" ({event})"
    raise MixesRecords(
        f"{type(model).__name__} is stateful: what it gives for a record depends on the passes "
        f"before{where}, so earlier records could be in later gradients without noise. Remove what "
        "is kept from pass to pass, or make it a function of the step in a callback"
    )


def refuse_mixing(model: nn.Module) -> None:
    """Raise MixesRecords if a module uses, or keeps, statistics of the batch, or rewrites weights.

    Batch statistics let one record move everyone's output, and so everyone's gradient: clipping
    each gradient bounds nothing. Frozen or `affine=False` does not help: the statistics are what
    mixes. In evaluation mode with fixed statistics records stay apart.
    """
    for module in model.modules():
        # Without running statistics even evaluation mode normalises by the batch's own.
        batch_statistics = module.training or getattr(module, "running_mean", None) is None
        if isinstance(module, BatchNorm) and batch_statistics:
            raise MixesRecords(
                f"{_called(module, model)} mixes records through batch statistics, so no record's "
                "share of the gradient is bounded; replace it by GroupNorm "
                "(tacit.make_trainable(model) does), keep it in evaluation mode with statistics "
                "from public data, or train with tacit.BatchClip"
            )
        if isinstance(module, InstanceNorm) and module.training and module.track_running_stats:
            raise MixesRecords(
                f"{_called(module, model)} keeps running statistics of the records it sees, which "
                "would be released without noise; build it with track_running_stats=False"
            )
    refuse_rewriting(model)


def refuse_rewriting(model: nn.Module) -> None:
    """Raise MixesRecords if a module rewrites its weights, or normalises across processes."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise MixesRecords(
                f"{_called(module, model)} has max_norm, which rewrites the rows that records ask "
                "for without any noise; build it without max_norm"
            )
        if isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_initialized():
            raise MixesRecords(
                f"{_called(module, model)} normalises by the records of all processes together, so "
                "their mini-sets are mixed; use BatchNorm, which sees one mini-set at a time"
            )


def _called(module: nn.Module, model: nn.Module) -> str:
    kind = type(module).__name__
    name = next(name for name, part in model.named_modules() if part is module)
    return f"module {name!r} ({kind})" if name else f"the model itself ({kind})"
