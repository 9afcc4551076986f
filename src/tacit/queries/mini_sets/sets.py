"""The mini-sets of a batch, each as a batch of its own."""

from __future__ import annotations

import torch

from tacit.batch import Batch
from tacit.errors import UnsupportedEvent
from tacit.sampling.schemes import MiniSets


def require_sets(batch: Batch, size: int) -> None:
    """Raise UnsupportedEvent unless the batch was drawn in sets of `size` records.

    Sets must come from a partition by record id, fixed before the data were seen. Cut from a batch
    by position, they would all change when one record is taken out, and one record could move the
    sum by 2·C *for each set*. A set of one record cannot be cut in another way, so any sampler
    will do for those.
    """
    scheme = batch.scheme
    if isinstance(scheme, MiniSets) and scheme.set_size == size and batch.groups is not None:
        return
    if size == 1 and batch.groups is None:
        return
    drawn = f"mini-sets of {scheme.set_size}" if isinstance(scheme, MiniSets) else scheme.describe()
    raise UnsupportedEvent(
        f"the query clips mini-sets of {size} records, and the batch was drawn as {drawn}; "
        f"draw it with MiniSetSampler(data, {size}, ...)"
    )


def draws_one_set(batch: Batch) -> bool:
    """Whether every step draws a single set, which is public."""
    return isinstance(batch.scheme, MiniSets) and batch.scheme.chosen == 1


def sets_of(batch: Batch) -> list[Batch]:
    """Each mini-set that takes part, without padding, in the order of the sets' numbers."""
    if batch.mask is not None:
        batch = batch.only(batch.mask).with_mask(None)
    if batch.groups is None:
        places = torch.arange(len(batch), device=batch.indices.device)
        return [batch.only(places[i : i + 1]) for i in range(len(batch))]
    if len(batch) == 0:
        return []
    if draws_one_set(batch):
        return [batch]  # there is nothing to sort
    order = torch.argsort(batch.groups, stable=True)
    _, sizes = torch.unique_consecutive(batch.groups[order], return_counts=True)
    return [batch.only(rows) for rows in order.split(sizes.tolist())]
