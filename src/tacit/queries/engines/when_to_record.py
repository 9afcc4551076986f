"""When a step is recorded unasked: known models, on a GPU, at sizes that come again."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.functional import pad

from tacit.batch import Batch
from tacit.cuda_graph import CaptureFailed
from tacit.queries.engines.recordable import recordable

_SHAPES_AN_OCTAVE = 16
_PIECES = 8


class WhenToRecord:
    """Decides by the model, the loss and the device; gives a piece the shape of its recording.

    Batches of a Poisson sampler have many sizes, and a recording has one, so rows that count for
    nobody are added up to the next of a few sizes (see `rows_for`). A model whose forward pass
    waits for a number cannot be recorded: that is found out once, said, and it runs as it is.
    """

    def __init__(self) -> None:
        self._failed: WeakSet[nn.Module] = WeakSet()

    def shaped(self, model: nn.Module, loss: object, piece: Batch, views: int) -> Batch | None:
        """The piece for an engine that records, or None where the step is to run as it is."""
        if not piece.indices.is_cuda or len(piece) == 0:
            return None
        if model in self._failed or not recordable(model, loss):
            return None
        # A batch that comes with a mask was given its shape by whoever made it.
        return piece if piece.mask is not None else padded(piece, rows_for(piece, views))

    def failed(self, model: nn.Module, error: CaptureFailed) -> None:
        self._failed.add(model)
        warnings.warn(
            f"a step of {type(model).__name__} cannot be recorded and runs as it is: "
            f"{error.__cause__}",
            stacklevel=3,
        )

    def forget(self) -> None:
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
    """The same records, and the dataset's first in further rows, which count for nobody."""
    missing = rows - len(piece)
    place = torch.arange(rows, device=piece.indices.device)
    indices = pad(piece.indices, (0, missing))
    return replace(piece, indices=indices, mask=place < len(piece), groups=None)
