"""What a sampler hands to a query: who takes part in a step, lazily gathered."""

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
    """One draw of a sampler, and whether a gradient of it was released.

    Steps are accounted as independent draws. Two releases of one draw are not: whoever was drawn
    is in both, so the second would be charged for an amplification that it does not have.
    `sampling` names the seeded stream that it came from, None without a seed, and `step` the place
    in it.
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

    `divisor` is the declared expected batch size: the sum of gradients is divided by it and
    never by `len(batch)`, which is private. `mask` is False on rows that are padding.
    `groups` numbers the mini-set of each row where records are drawn in sets.
    `max_physical` bounds how many rows are gathered at once; the result does not depend on it.
    `epoch` names the shuffled epoch that the batch is a part of: within one, a record takes
    part once, and all its batches together are one event. `drawn` is set by samplers: a batch's
    gradient is released once.
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

    def only(self, keep: Tensor) -> Batch:
        """The same batch without the rows that are not to be kept."""
        return replace(
            self,
            indices=self.indices[keep],
            mask=None if self.mask is None else self.mask[keep],
            groups=None if self.groups is None else self.groups[keep],
        )

    def with_mask(self, mask: Tensor | None) -> Batch:
        return replace(self, mask=mask)

    def first(self, count: int) -> Batch:
        """The first rows alone, all of them counted as records."""
        return replace(
            self,
            indices=self.indices[:count],
            mask=None,
            groups=None if self.groups is None else self.groups[:count],
        )

    def at_most(self, rows: int, views: int = 1) -> Batch:
        """The same batch, in pieces of at most so many rows where it has more, `views` a record."""
        if len(self) * views <= rows:
            return self
        return replace(self, max_physical=min(self.max_physical or rows, rows))

    def physical(self) -> Iterator[Batch]:
        """The same rows in pieces of at most `max_physical`; none at all when nobody takes part."""
        size = self.max_physical or max(len(self), 1)
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield replace(
                self,
                indices=self.indices[rows],
                mask=None if self.mask is None else self.mask[rows],
                groups=None if self.groups is None else self.groups[rows],
            )

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
    """A batch from tensors or pytrees of them, for those who sample on their own.

    The scheme is what is accounted. Every release must then be of a draw of its own; nothing
    here can check that.
    """
    records = Records(inputs, targets)
    indices = torch.arange(len(records), device=records.device)
    return Batch(records, indices, divisor, scheme, max_physical=max_physical)
