"""Physical batches as an engine takes them: several views of each record, in consecutive rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tacit.batch import Batch, batch_of
from tacit.checks.isolation import require_views_apart
from tacit.data.augmentation import Augmentation


class ViewBatches:
    """Cuts a batch into pieces and draws the views of each piece, once.

    Once: were a piece's views drawn again where a record turns out not finite, that record would
    change the others' views. `max_physical` counts rows, K of them a record; a single record's
    views stay together, however many they are.
    """

    def __init__(self, augmentation: Augmentation | None) -> None:
        self.augmentation = augmentation
        self._checked = False

    @property
    def views(self) -> int:
        return 1 if self.augmentation is None else self.augmentation.views

    def first(self, inputs: Tensor) -> Tensor:
        """One view of each record; without an augmentation, its inputs."""
        if self.augmentation is None:
            return inputs
        return self.augmentation.views_of(inputs)[:: self.views]

    def of(self, batch: Batch) -> Iterator[Batch]:
        if self.augmentation is None:
            yield from batch.physical()
            return
        self._checked = self._checked or require_views_apart(self.augmentation, batch)
        if batch.max_physical is not None:
            batch = replace(batch, max_physical=max(1, batch.max_physical // self.views))
        for piece in batch.physical():
            seen = batch_of(
                self.augmentation.views_of(piece.inputs, piece.record_ids),
                torch.repeat_interleave(piece.targets, self.views, dim=0),
                divisor=piece.divisor,
                scheme=piece.scheme,
            )
            mask = piece.mask
            yield seen.with_mask(None if mask is None else mask.repeat_interleave(self.views))
