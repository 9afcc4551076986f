"""Set by set as a CUDA graph: the pass of a mini-set is recorded once a shape, and replayed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tacit.batch import Batch
from tacit.cuda_graph import capture, state_of
from tacit.queries.engines.held_constants import HeldConstants
from tacit.queries.engines.task import Clipped, Task
from tacit.queries.mini_sets.engines import SetBySet, _mean_only, added_up
from tacit.queries.mini_sets.one_set import clipped_vector
from tacit.queries.mini_sets.set_gradients import SetGradient


@dataclass
class _Recording:
    """A graph, what it reads and what it writes; the task is held so that no id is used again."""

    task: Task
    graph: Any
    inputs: Tensor
    targets: Tensor
    constants: HeldConstants
    clipped: Clipped


class ReplayedSets:
    """`SetBySet` for mean gradients, recorded; off a GPU it is `SetBySet`.

    The model's structure, settings, mode and places in memory are part of a recording's key.
    Control flow that depends on the data cannot be recorded.
    """

    def __init__(self) -> None:
        self.engine = SetBySet()
        self._recordings: dict[Hashable, _Recording] = {}
        self._pool: Any = None

    def clipped_sums(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> Clipped:
        if not sets or not sets[0].indices.is_cuda:
            return self.engine.clipped_sums(task, gradient, sets)
        _mean_only("ReplayedSets", gradient)
        if len(sets) == 1:
            return self._one(task, gradient, sets[0])  # nothing replays before it is added up
        return added_up(self._one(task, gradient, one) for one in sets)

    def block_norms(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> list[Tensor]:
        return self.engine.block_norms(task, gradient, sets)

    def forget(self) -> None:
        """Give the recordings' memory back; the next step records anew."""
        self._recordings.clear()
        self._pool = None

    def _one(self, task: Task, gradient: SetGradient, one: Batch) -> Clipped:
        key = self._key(task, one)
        recording = self._recordings.get(key)
        if recording is None:
            found = self.engine.clipped_sums(task, gradient, [one])
            self._recordings[key] = self._record(task, gradient, one)
            return found
        recording.inputs.copy_(one.inputs)
        recording.targets.copy_(one.targets)
        recording.constants.follow(task)
        recording.graph.replay()
        return recording.clipped

    def _record(self, task: Task, gradient: SetGradient, one: Batch) -> _Recording:
        inputs, targets = one.inputs.clone(), one.targets.clone()
        constants, still = HeldConstants.of(task, inputs.device)

        def run() -> Clipped:
            found = SetBySet.gradient_of(task, gradient, inputs, targets)
            return clipped_vector(still, found)

        graph, clipped = capture(run, pool=self._pool)
        self._pool = graph.pool()  # recordings take turns, so they may share their memory
        return _Recording(task, graph, inputs, targets, constants, clipped)

    @staticmethod
    def _key(task: Task, one: Batch) -> Hashable:
        shape = (len(one), one.records.shape, one.records.inputs.dtype)
        asked = (id(task.loss), tuple(task.parameters), task.blocks)
        masks = tuple((name, mask.data_ptr()) for name, mask in task.active.items())
        how = (task.rule, task.counted, task.factors is None, masks)
        return asked, how, shape, state_of(task.model)
