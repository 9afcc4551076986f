"""Physical batches for engines, with several views of each record in consecutive rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tacit.checks.side_effects import require_isolated_views
from tacit.data.augmentation import Augmentation
from tacit.engines.model_check import sample_records
from tacit.engines.pass_state import PassState
from tacit.pytrees import Tree, map_tensors, tensors_of
from tacit.sampling.sampler import Batch, batch_of


class ViewBatches:
    """Cuts a batch into pieces and draws the views of each piece, once.

    If a piece's views were drawn again because a record is not finite, that record would change
    the others' views. `max_physical` counts rows, K per record. The views of one record stay
    together, however many they are.
    """

    def __init__(self, augmentation: Augmentation | None) -> None:
        self.augmentation = augmentation
        self.views = 1 if augmentation is None else augmentation.views
        self._checked = False

    def first(self, inputs: Tree) -> Tree:
        """One view of each record; without an augmentation, its inputs."""
        if self.augmentation is None:
            return inputs
        return map_tensors(lambda t: t[:: self.views], self.augmentation.views_of(inputs))

    def of(self, batch: Batch) -> Iterator[Batch]:
        """The pieces of the batch, each record replaced by its views."""
        assert self.augmentation is not None  # a batch without views is cut by `physical`
        self._checked = self._checked or self._check(self.augmentation, batch)
        if batch.max_physical is not None:
            batch = replace(batch, max_physical=max(1, batch.max_physical // self.views))
        for piece in batch.physical():
            seen = batch_of(
                self.augmentation.views_of(piece.inputs, piece.record_ids),
                map_tensors(lambda t: t.repeat_interleave(self.views, dim=0), piece.targets),
                divisor=piece.divisor,
                scheme=piece.scheme,
            )
            mask = piece.mask
            yield seen.with_mask(None if mask is None else mask.repeat_interleave(self.views))

    @staticmethod
    def _check(augmentation: Augmentation, batch: Batch) -> bool:
        if augmentation.rows_apart:
            return True
        inputs, _ = sample_records(batch, 256)
        state = PassState(inputs)

        def views_of(x: Tree) -> Tensor:
            state.restore_draws()
            return torch.cat([t.flatten(1) for t in tensors_of(augmentation.views_of(x))], dim=1)

        try:
            return require_isolated_views(
                augmentation.transform, views_of, inputs, augmentation.views
            )
        finally:
            state.restore_draws()
