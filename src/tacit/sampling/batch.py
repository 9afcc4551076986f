"""What a sampler hands to a query: the records of one step, gathered when they are read."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from tacit.pytrees import Tree, map_tensors, take_rows
from tacit.records import Records

if TYPE_CHECKING:
    from tacit.sampling.scheme import Scheme

T = TypeVar("T")


class Draw:
    """One draw of a sampler, and whether its gradient has been released.

    The accountant treats steps as independent draws. Two releases of one draw contain the same
    records, so amplification by sampling does not hold for the second. `sampling` names the seeded
    stream of the draw (None without a seed), and `step` is its place in that stream.
    """

    def __init__(self, sampling: str | None = None, step: int | None = None) -> None:
        self.released = False
        self.sampling, self.step = sampling, step
        self.pid = os.getpid()

    def __copy__(self) -> Draw:
        return self  # a copied batch is still the same draw

    def __deepcopy__(self, memo: object) -> Draw:
        return self

    def __reduce__(self) -> str:
        raise TypeError(
            "a drawn batch cannot be pickled: its copy could be released a second time; draw "
            "batches in the process that releases them"
        )


@dataclass(frozen=True)
class Batch:
    """The records of one step.

    Args:
        records: The dataset.
        indices: Rows of the dataset that take part.
        divisor: The declared expected batch size. The sum of gradients is divided by it, never by
            `len(batch)`, which is private.
        scheme: How the records were sampled, for the accountant.
        mask: False on rows that are padding.
        groups: The mini-set of each row, where records are drawn in sets.
        max_physical: The most rows to gather at once. The result does not depend on it.
        epoch: The key of the shuffled epoch that this batch belongs to. A record takes part once
            per epoch, and all batches of one epoch are charged as one event.
        drawn: The sampler's draw. Its gradient is released once.
    """

    records: Records
    indices: Tensor
    divisor: float
    scheme: Scheme
    mask: Tensor | None = None
    groups: Tensor | None = None
    max_physical: int | None = None
    epoch: Hashable | None = None
    drawn: Draw | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        # Without the number of rows, which is private.
        return f"Batch({self.records.name!r}, divisor={self.divisor:g}, scheme={self.scheme!r})"

    @property
    def inputs(self) -> Tree:
        """The inputs of these records, in the structure of `records.inputs`."""
        return self._gather(self.records.inputs)

    @property
    def targets(self) -> Tree:
        """The targets of these records, in the structure of `records.targets`."""
        return self._gather(self.records.targets)

    @property
    def record_ids(self) -> Tensor:
        return self._gather(self.records.record_ids)

    def only(self, rows: Tensor | slice) -> Batch:
        """These rows of the batch, given as a mask, as indices or as a slice."""
        return replace(
            self,
            indices=self.indices[rows],
            mask=None if self.mask is None else self.mask[rows],
            groups=None if self.groups is None else self.groups[rows],
        )

    def with_mask(self, mask: Tensor | None) -> Batch:
        return replace(self, mask=mask)

    def first(self, count: int) -> Batch:
        """The first `count` rows, all of them counted as records."""
        return self.only(slice(count)).with_mask(None)

    def at_most(self, rows: int, views: int = 1) -> Batch:
        """Limit physical batches to `rows` records if the batch has more, `views` per record."""
        if len(self) * views <= rows:
            return self
        return replace(self, max_physical=min(self.max_physical or rows, rows))

    def physical(self) -> Iterator[Batch]:
        """The same rows in pieces of at most `max_physical`; an empty batch has no pieces."""
        size = self.max_physical or max(len(self), 1)
        for start in range(0, len(self), size):
            yield self.only(slice(start, start + size))

    def _gather(self, columns: T) -> T:
        if len(self.records) == 0:  # padding of an empty dataset
            return map_tensors(lambda t: t.new_zeros((len(self), *t.shape[1:])), columns)
        return take_rows(columns, self.indices)


def batch_of(
    inputs: Tree,
    targets: Tree,
    *,
    divisor: float,
    scheme: Scheme,
    max_physical: int | None = None,
) -> Batch:
    """A batch from tensors or pytrees of them, for users who sample on their own.

    The ledger charges what `scheme` says. Every release must then have a draw of its own, which
    Tacit cannot check.
    """
    records = Records(inputs, targets)
    indices = torch.arange(len(records), device=records.device)
    return Batch(records, indices, divisor, scheme, max_physical=max_physical)
