"""Physical batches as an engine takes them: several views of each record, in consecutive rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tacit.batch import Batch, batch_of
from tacit.data.augmentation import Augmentation
from tacit.errors import MixesRecords
from tacit.queries.same_tensors import same_tensors
from tacit.randomness import GlobalGenerators

_RECORDS_TO_CHECK, _HALVES = 64, 3


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
                self.augmentation.views_of(inputs, piece.record_ids),
                torch.repeat_interleave(piece.targets, self.views, dim=0),
                divisor=piece.divisor,
                scheme=piece.scheme,
            )
            mask = piece.mask
            yield seen.with_mask(None if mask is None else mask.repeat_interleave(self.views))


def rows_stay_apart(augmentation: Augmentation, inputs: Tensor) -> bool:
    """Whether a record's views stay the same when others of the batch are exchanged.

    MixesRecords if they do not; False if these inputs cannot tell. Several random halves of the
    batch are exchanged, for another record's copies and for zeros, so that neither neighbours nor
    halves nor any fixed distance can meet unseen. PyTorch's, Python's and NumPy's generators are
    set back each time. A transform with a generator of its own cannot be asked: that is refused,
    unless it was declared that its rows are apart.
    """
    if augmentation.rows_apart:
        return True
    some = inputs[:_RECORDS_TO_CHECK]
    views = augmentation.views
    expected = _views_again(augmentation, some)
    if not same_tensors(expected, _views_again(augmentation, some)):
        raise MixesRecords(
            f"the augmentation {augmentation.transform!r} gives other views of the same batch with "
            "the same seeds, so it has a generator of its own and nobody can see whether records "
            "meet in it; draw from torch's generator, or declare Augmentation(..., rows_apart=True)"
        )
    order = torch.Generator().manual_seed(0)
    told = False
    for _ in range(_HALVES):
        shuffled = torch.randperm(len(some), generator=order).to(some.device)
        stay, go = shuffled[: (len(some) + 1) // 2], shuffled[(len(some) + 1) // 2 :]
        for other in (some[stay[:1]], torch.zeros_like(some[:1])):
            exchanged = some.clone()
            exchanged[go] = other
            told = told or not torch.equal(some, exchanged)
            changed = _views_again(augmentation, exchanged)
            if not same_tensors(*(v.unflatten(0, (-1, views))[stay] for v in (expected, changed))):
                raise MixesRecords(
                    f"the augmentation {augmentation.transform!r} lets other records into a "
                    "record's views, so no record's share of the gradient is bounded; use one that "
                    "works on each row alone"
                )
    return told


def _views_again(augmentation: Augmentation, inputs: Tensor) -> Tensor:
    """Views with every global generator as it is now, and left as it is now."""
    held = GlobalGenerators.now(inputs.device)
    try:
        return augmentation.views_of(inputs)
    finally:
        held.restore(inputs.device)
