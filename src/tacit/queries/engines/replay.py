"""Book-keeping as one CUDA graph: a step of hundreds of small launches becomes one.

At a thousand records a GPU finishes each layer sooner than Python can ask for the next. Recorded
once a batch shape, the whole of forward, backward, norms and contraction is asked for at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.batch import Batch, batch_of
from tacit.cuda_graph import capture, state_of
from tacit.queries.engines.book_keeping import BookKeeping
from tacit.queries.engines.held_constants import HeldConstants
from tacit.queries.engines.task import Clipped, Task


@dataclass
class _Recording:
    """A graph, the tensors it reads, and the tensors it writes.

    It holds on to its task, so that no other model or loss can come to have the same id.
    """

    task: Task
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    targets: Tensor
    mask: Tensor | None
    constants: HeldConstants
    clipped: Clipped


class Replay:
    """Records `BookKeeping` for each batch shape and replays it; off a GPU it is `BookKeeping`.

    The sums are the same. Give it few shapes: `PoissonSampler(..., pad_to=32)` or `padded=True`.
    Clipping constants may change from step to step: a recording reads them each time. The model
    must not change its structure, its training mode or its parameters' places between steps
    without a new recording; all of these are part of a recording's key. Control flow that depends
    on the data cannot be recorded: use `BookKeeping` for such a model. A shape is recorded when it
    has come `after` times before. How often is private, so a step that is not replayed reads its
    constants in the same way, and is told from a replay by no choice that is made here.
    """

    def __init__(self, engine: BookKeeping | None = None, after: int = 0) -> None:
        self.engine = engine or BookKeeping()
        self.after = after
        self._met: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, _Recording] = {}
        self._pool: Any = None

    @property
    def eager(self) -> BookKeeping:
        return self.engine

    def clipped_sums(self, task: Task, piece: Batch) -> Clipped:
        if not piece.indices.is_cuda or len(piece) == 0:
            return self.engine.clipped_sums(task, piece)
        key = self._key(task, piece)
        recording = self._recordings.get(key)
        if recording is None:
            # The first time is run as it is, which also compiles kernels.
            _, reading = HeldConstants.of(task, piece.indices.device)
            found = self.engine.clipped_sums(reading, piece)
            if self._met[key] >= self.after:
                self._recordings[key] = self._record(task, piece)
            self._met[key] += 1
            return found
        recording.inputs.copy_(piece.inputs)
        recording.targets.copy_(piece.targets)
        if recording.mask is not None and piece.mask is not None:
            recording.mask.copy_(piece.mask)
        recording.constants.follow(task)
        recording.graph.replay()
        # The next replay overwrites its sums; the caller adds them up before that. Nobody waits
        # here for the GPU: Python asks for the next step while this one runs.
        return recording.clipped

    def block_norms(self, task: Task, piece: Batch) -> list[Tensor]:
        return self.engine.block_norms(task, piece)

    def forget(self) -> None:
        """Give the recordings' memory back; the next step records anew."""
        self._recordings.clear()
        self._met.clear()
        self._pool = None

    def _record(self, task: Task, piece: Batch) -> _Recording:
        inputs, targets = piece.inputs.clone(), piece.targets.clone()
        mask = None if piece.mask is None else piece.mask.clone()
        constants, still_task = HeldConstants.of(task, inputs.device)

        def run() -> Clipped:
            still = batch_of(inputs, targets, divisor=piece.divisor, scheme=piece.scheme)
            return self.engine.sums_and_keep(still_task, still.with_mask(mask))[0]

        graph, clipped = capture(run, pool=self._pool)
        self._pool = graph.pool()  # recordings take turns, so they may share their memory
        return _Recording(task, graph, inputs, targets, mask, constants, clipped)

    @staticmethod
    def _key(task: Task, piece: Batch) -> Hashable:
        shape = (len(piece), piece.records.shape, piece.records.inputs.dtype, piece.mask is None)
        asked = (id(task.loss), tuple(task.parameters), task.blocks)
        masks = tuple((name, mask.data_ptr()) for name, mask in task.active.items())
        how = (task.rule, task.views, task.counted, task.factors is None, masks)
        return asked, how, shape, state_of(task.model)
