"""Does an augmentation work on each record alone?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tacit.errors import MixesRecords
from tacit.pytrees import Tree, flat_rows, take_rows

_MOST_VIEWED = 64


def require_views_apart(
    transform: object, views_of: Callable[[Tree], Tensor], x: Tree, views: int
) -> bool:
    """Raise MixesRecords if a record's views depend on the other records, now or earlier.

    Random halves of up to 64 records are exchanged for other records, under equal draws. A
    transform with a generator of its own is refused, unless its rows are declared to be apart.
    Returns whether the records could tell.
    """
    x = take_rows(x, slice(_MOST_VIEWED))
    numbers = flat_rows(x)
    if len(numbers) == 0:
        return False

    def made(rows: Tensor) -> Tensor:
        return views_of(take_rows(x, rows)).unflatten(0, (-1, views))

    device = numbers.device
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0)).to(device)
    every, half = torch.arange(len(numbers), device=device), (len(numbers) + 1) // 2
    expected = made(every)
    made(every.flip(0))
    if not same_tensors(expected, made(every)):
        raise MixesRecords(
            f"the augmentation {transform!r} gives other views of the same records with the same "
            "seeds: it remembers earlier ones, or draws from a generator of its own; draw from "
            "torch's generator, or declare Augmentation(..., rows_apart=True)"
        )
    for stay, go in ((order[:half], order[half:]), (order[half:], order[:half])):
        for rows in _exchanged(stay, go, numbers):
            if not same_tensors(expected[stay], made(rows)[stay]):
                raise MixesRecords(
                    f"the augmentation {transform!r} lets other records into a record's views, so "
                    "no record's share of the gradient is bounded; use one that works on each row "
                    "alone"
                )
    return not same_tensors(numbers, numbers[:1].expand_as(numbers))


def same_tensors(a: Tensor, b: Tensor) -> bool:
    """Equal to the last entry, where NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _exchanged(stay: Tensor, go: Tensor, x: Tensor) -> Iterator[Tensor]:
    """Rows with those of `go` exchanged: for other records, among themselves, and for one."""
    by_sum = stay[x[stay].double().reshape(len(stay), -1).sum(dim=1).argsort()]
    ones = torch.cat([by_sum[-1:], by_sum[:1], stay[:2]])
    for instead in (stay[: len(go)], go.flip(0), *ones.split(1)):
        rows = torch.arange(len(x), device=stay.device)
        rows[go] = instead if len(instead) == len(go) else instead[:1]
        yield rows
