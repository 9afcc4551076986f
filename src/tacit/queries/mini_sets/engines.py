"""How the clipped sum over mini-sets is computed: set by set, or all sets at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tacit.batch import Batch, batch_of
from tacit.engines import Automatic, Clipped, Engine, Recorder, Task
from tacit.engines.clipping import sum_dtype
from tacit.engines.recorder import Outputs
from tacit.engines.torch_internals import swapped
from tacit.errors import UnsupportedModule
from tacit.pytrees import Tree, map_tensors, tensors_of
from tacit.queries.mini_sets.one_set import clipped_vector, norms_of_vector
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
        found = (self._clipped(task, gradient, one) for one in sets)
        return next(found) if len(sets) == 1 else added_up(found)

    def block_norms(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> list[Tensor]:
        each = [
            norms_of_vector(task, self.gradient_of(task, gradient, one.inputs, one.targets))
            for one in sets
        ]
        return list(torch.stack(each, dim=1).unbind())

    def forget(self) -> None:
        self.recorder.forget()

    def _clipped(self, task: Task, gradient: SetGradient, one: Batch) -> Clipped:
        inputs, targets = one.inputs, one.targets
        if not one.indices.is_cuda or not isinstance(gradient, MeanGradient):
            return clipped_vector(task, self.gradient_of(task, gradient, inputs, targets))
        step = _SetStep(task, gradient, inputs, targets)
        found = self.recorder(step, step.batch())
        counts = tuple(found[f"#{h}"] for h in range(len(task.blocks)) if f"#{h}" in found)
        return Clipped({n: found[n] for n in task.parameters}, counts)

    @staticmethod
    def gradient_of(
        task: Task, gradient: SetGradient, inputs: Tree, targets: Tree
    ) -> dict[str, Tensor]:
        """g of one set; zero where BatchNorm refuses so few records."""
        loss: Any = task.loss
        with too_small_is_nothing() as nothing:
            return gradient(task.model, loss, task.parameters, inputs, targets)
        assert nothing
        return {n: torch.zeros_like(p, requires_grad=False) for n, p in task.parameters.items()}


@dataclass
class _SetStep:
    """The clipped mean gradient of one set, as work for the recorder."""

    task: Task
    gradient: SetGradient
    inputs: Tree
    targets: Tree

    @property
    def model(self) -> nn.Module:
        return self.task.model

    @property
    def key(self) -> Hashable:
        task = self.task
        masks = tuple((name, mask.data_ptr()) for name, mask in task.active.items())
        asked = (id(task.loss), tuple(task.parameters), task.blocks)
        return asked, task.rule, task.counted, task.factors is None, masks

    def batch(self) -> list[Tensor]:
        leaves = tensors_of((self.inputs, self.targets))
        numbers = [float(c) for c in (*self.task.norms, *(self.task.factors or ()))]
        constants = torch.tensor(numbers, dtype=torch.float64).pin_memory()
        return [*leaves, constants.to(leaves[0].device, non_blocking=True)]

    def run(self, batch: Sequence[Tensor]) -> Outputs:
        return self._run(self.task, batch)

    def run_with(self, weights: dict[str, Tensor], batch: Sequence[Tensor]) -> Outputs:
        parameters: Any = {name: weights[name] for name in self.task.parameters}
        with swapped(self.model, weights):
            return self._run(replace(self.task, parameters=parameters), batch)

    def _run(self, task: Task, batch: Sequence[Tensor]) -> Outputs:
        *leaves, constants = batch
        each, of_norms = constants.unbind(), len(task.norms)
        factors = None if task.factors is None else each[of_norms:]
        following = iter(leaves)
        inputs, targets = map_tensors(lambda t: next(following), (self.inputs, self.targets))
        vector = SetBySet.gradient_of(task, self.gradient, inputs, targets)
        found = clipped_vector(replace(task, norms=each[:of_norms], factors=factors), vector)
        return found.sums | {f"#{h}": count for h, count in enumerate(found.counts)}


class SetsAsRecords:
    """Per-sample clipping's engine on sets whose records do not meet inside the model.

    The mean gradient of a set of s records is that of one record with s views, so book-keeping
    gives all sets in one forward and one backward pass. At s = 1 it *is* per-sample clipping. All
    sets go this way, also one that is alone in its size: book-keeping clips by upper bounds of
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
