"""Physical batches as an engine takes them: several views of each record, in consecutive rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tacit.batch import Batch, batch_of
from tacit.data.augmentation import Augmentation
from tacit.errors import MixesRecords

_RECORDS_TO_CHECK = 16


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

    def of(self, batch: Batch) -> Iterator[Batch]:
        if self.augmentation is None:
            yield from batch.physical()
            return
        if batch.max_physical is not None:
            batch = replace(batch, max_physical=max(1, batch.max_physical // self.views))
        for piece in batch.physical():
            inputs = piece.inputs
            self._checked = self._checked or rows_stay_apart(self.augmentation, inputs)
            seen = batch_of(
                self.augmentation.views_of(inputs),
                torch.repeat_interleave(piece.targets, self.views, dim=0),
                divisor=piece.divisor,
                scheme=piece.scheme,
            )
            mask = piece.mask
            yield seen.with_mask(None if mask is None else mask.repeat_interleave(self.views))


def rows_stay_apart(augmentation: Augmentation, inputs: Tensor) -> bool:
    """Whether every other record's views stay the same when those between are exchanged.

    MixesRecords if they do not; False if these inputs cannot tell. The generator is set back each
    time. A transform with randomness of its own cannot be asked, and passes.
    """
    some = inputs[:_RECORDS_TO_CHECK]
    exchanged = some.clone()
    exchanged[1::2] = some[:1]
    if torch.equal(some, exchanged):
        return False
    devices = [inputs.device] if inputs.device.type == "cuda" else []

    def views_of_others(of: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=devices):
            return augmentation.views_of(of).unflatten(0, (-1, augmentation.views))[::2]

    expected, again = views_of_others(some), views_of_others(some)
    changed = views_of_others(exchanged)
    if _same(expected, again) and not _same(expected, changed):
        raise MixesRecords(
            f"the augmentation {augmentation.transform!r} lets other records into a record's "
            "views, so no record's share of the gradient is bounded; use one that works on each "
            "row alone"
        )
    return True


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a != a)).all())
