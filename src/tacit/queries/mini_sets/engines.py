"""How the clipped sum over mini-sets is computed: set by set, or all sets at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tacit.batch import Batch, batch_of
from tacit.engines import Automatic, Clipped, Engine, Recorder, Task
from tacit.engines.automatic import ClippingStep
from tacit.engines.clipping import sum_dtype
from tacit.engines.draws import from_one_start
from tacit.engines.gradients import RecordGradients, Scale, Stacked
from tacit.engines.precision import wide
from tacit.engines.sums import clipped, norms_of_blocks
from tacit.errors import UnsupportedModule
from tacit.pytrees import Tree, device_of, map_tensors
from tacit.queries.mini_sets.set_gradients import MeanGradient, SetGradient
from tacit.queries.mini_sets.too_small import too_small_is_nothing


class SetEngine(Protocol):
    """Σ_j [g(w; S_j)]_C over some mini-sets, and the norms of g for public ones."""

    def clipped_sums(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> Clipped: ...

    def block_norms(
        self, task: Task, gradient: SetGradient, sets: Sequence[Batch]
    ) -> list[Tensor]: ...


class SetBySet:
    """Each mini-set in a pass of its own, with any g and any module.

    On a GPU the pass of a set's mean gradient is recorded once per shape (`Recorder`).
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()

    def clipped_sums(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> Clipped:
        def work(task: Task, inputs: Tree, targets: Tree, mask: Tensor | None = None) -> Clipped:
            return clipped_vector(task, vector_of(task, gradient, inputs, targets))

        def found(one: Batch) -> Clipped:
            if not one.indices.is_cuda or not isinstance(gradient, MeanGradient):
                return work(task, one.inputs, one.targets)
            return ClippingStep(task, one.inputs, one.targets, work).through(self.recorder)

        if len(sets) == 1:
            return found(sets[0])
        return added_up(from_one_start(map(found, sets), task.model))

    def block_norms(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> list[Tensor]:
        device = sets[0].indices.device
        vectors = (vector_of(task, gradient, one.inputs, one.targets) for one in sets)
        each = [norms_of_blocks(task, as_one_record(task, v), 1, device) for v in vectors]
        return [torch.cat(of_block) for of_block in zip(*each, strict=True)]

    def forget(self) -> None:
        self.recorder.forget()


def vector_of(task: Task, gradient: SetGradient, inputs: Tree, targets: Tree) -> dict[str, Tensor]:
    """g of one set; zero where BatchNorm refuses so few records."""
    loss: Any = task.loss
    with too_small_is_nothing() as nothing:
        return gradient(task.model, loss, task.parameters, inputs, targets)
    assert nothing
    return {n: torch.zeros_like(p, requires_grad=False) for n, p in task.parameters.items()}


def clipped_vector(task: Task, vector: dict[str, Tensor]) -> Clipped:
    """[g]_C of one set; nothing at all where its squared norm is not finite."""
    return clipped(task, as_one_record(task, vector), 1, device_of(vector), None)


def as_one_record(task: Task, vector: dict[str, Tensor]) -> dict[str, RecordGradients]:
    """A set's vector as the gradients of one record, with zeros in the entries not active."""
    found: dict[str, RecordGradients] = {}
    for name, tensor in vector.items():
        row, mask = wide(tensor.detach()).unsqueeze(0), task.active.get(name)
        found[name] = _Row(row if mask is None else torch.where(mask, row, 0.0))
    return found


class _Row(Stacked):
    """One record's gradients: scaled by a multiplication, which a matrix product is slower than."""

    def total(self, scale: Scale) -> Tensor:
        return scale.of(self.rows_BP)[0]


class SetsAsRecords:
    """Per-sample clipping's engine on sets whose records do not meet inside the model.

    The mean gradient of a set of s records is that of one record with s views, so book-keeping
    gives all sets in one forward and one backward pass, and proves for each shape that runs that
    sets stay apart: its plan has sets in the place of records. At s = 1 it is per-sample clipping.
    All sets go this way, also one that is alone in its size: book-keeping clips by upper bounds of
    norms, so a set that changed its way because of another's record would move as well.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or Automatic()

    def clipped_sums(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> Clipped:
        _mean_only(gradient)
        return added_up(
            self.engine.clipped_sums(replace(task, views=len(alike[0])), _joined(alike))
            for alike in _by_size(sets)
        )

    def block_norms(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> list[Tensor]:
        _mean_only(gradient)
        found = [
            self.engine.block_norms(replace(task, views=len(alike[0])), _joined(alike))
            for alike in _by_size(sets)
        ]
        return [torch.cat(list(of_block)) for of_block in zip(*found, strict=True)]

    def forget(self) -> None:
        forget = getattr(self.engine, "forget", None)
        if forget is not None:
            forget()


def added_up(found: Iterable[Clipped]) -> Clipped:
    """Sums and counts of all parts, as new tensors: a next replay writes over a recording's.

    In float64 where the device has it, as parts may be thousands of sets.
    """
    sums: dict[str, Tensor] = {}
    counts: list[Tensor] = []
    for part in found:
        for name, value in part.sums.items():
            if name not in sums:
                sums[name] = torch.zeros_like(value, dtype=sum_dtype(value.device))
            sums[name] += value
        held = counts or [torch.zeros_like(count) for count in part.counts]
        counts = [c + d for c, d in zip(held, part.counts, strict=True)]
    return Clipped(sums, tuple(counts))


def _by_size(sets: Sequence[Batch]) -> list[list[Batch]]:
    """Sets of equal size together."""
    sizes: dict[int, list[Batch]] = {}
    for one in sets:
        sizes.setdefault(len(one), []).append(one)
    return list(sizes.values())


def _joined(sets: Sequence[Batch]) -> Batch:
    """Sets of one size as one batch, a set's records in consecutive rows."""

    def joined(*tensors: Tensor) -> Tensor:
        return torch.cat(tensors)

    return batch_of(
        map_tensors(joined, *(one.inputs for one in sets)),
        map_tensors(joined, *(one.targets for one in sets)),
        divisor=sets[0].divisor,
        scheme=sets[0].scheme,
    )


def _mean_only(gradient: SetGradient) -> None:
    if not isinstance(gradient, MeanGradient):
        raise UnsupportedModule(
            f"SetsAsRecords computes mean gradients, and was given {type(gradient).__name__}; use "
            "SetBySet()"
        )
