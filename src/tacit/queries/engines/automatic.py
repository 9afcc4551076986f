"""The engine that is used where none is named: recorded where that is safe, else as it is."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tacit.batch import Batch
from tacit.cuda_graph import CaptureFailed
from tacit.queries.engines.book_keeping import BookKeeping
from tacit.queries.engines.recordable import recordable
from tacit.queries.engines.replay import Replay
from tacit.queries.engines.task import Clipped, Task

_SHAPES_AN_OCTAVE = 16
_PIECES = 8


class Automatic:
    """`Replay` on a GPU for models that can surely be recorded (`recordable`), else `BookKeeping`.

    The sums are the same. Batches of a Poisson sampler have many sizes, and a recording has one, so
    rows that count for nobody are added up to the next of a few sizes (see `rows_for`); a size is
    recorded when it comes a second time. Which of the two is used depends on the model, the device
    and on sizes, and on nothing else about the records. A model whose forward pass waits for a
    number cannot be recorded: that is found out once, said, and it runs as it is.
    """

    def __init__(self) -> None:
        self._eager = BookKeeping()
        self._replay = Replay(self._eager)
        self._seen: set[Hashable] = set()
        self._failed: WeakSet[nn.Module] = WeakSet()

    def clipped_sums(self, task: Task, piece: Batch) -> Clipped:
        if not piece.indices.is_cuda or len(piece) == 0 or not self._may_record(task):
            return self._eager.clipped_sums(task, piece)
        # A batch that comes with a mask was given its shape by whoever made it.
        shaped = piece if piece.mask is not None else padded(piece, rows_for(piece, task.views))
        size = (id(task.model), len(shaped), piece.records.shape, task.views)
        if size not in self._seen:
            self._seen.add(size)
            return self._eager.clipped_sums(task, piece)
        try:
            return self._replay.clipped_sums(task, shaped)
        except CaptureFailed as error:
            self._failed.add(task.model)
            warnings.warn(
                f"a step of {type(task.model).__name__} cannot be recorded and runs as it is: "
                f"{error.__cause__}",
                stacklevel=2,
            )
            return self._eager.clipped_sums(task, piece)

    def _may_record(self, task: Task) -> bool:
        return task.model not in self._failed and recordable(task)

    def block_norms(self, task: Task, piece: Batch) -> list[Tensor]:
        return self._eager.block_norms(task, piece)

    def forget(self) -> None:
        """Give the recordings' memory back; later steps record anew."""
        self._replay.forget()
        self._seen.clear()
        self._failed.clear()


def rows_for(piece: Batch, views: int = 1) -> int:
    """The least size on a grid that is not below the piece's, in rows of whole records.

    Sixteen sizes an octave, so at most a sixteenth of the rows is padding: a Poisson batch of B
    has about 128/√B of them within four deviations. Pieces of at most `max_physical` rows have
    eight sizes, whatever the last of them holds.
    """
    records = math.ceil(len(piece) / views)
    grid = max(1, 2 ** (records.bit_length() - 1) // _SHAPES_AN_OCTAVE)
    rows = views * grid * math.ceil(records / grid)
    if piece.max_physical is None or piece.max_physical < len(piece):
        return rows
    part = views * math.ceil(piece.max_physical / (_PIECES * views))
    return min(max(rows, part * math.ceil(len(piece) / part)), max(piece.max_physical, len(piece)))


def padded(piece: Batch, rows: int) -> Batch:
    """The same records, and the first one again in rows that count for nobody."""
    missing = rows - len(piece)
    place = torch.arange(rows, device=piece.indices.device)
    return replace(piece, indices=pad(piece.indices, (0, missing)), mask=place < len(piece))
