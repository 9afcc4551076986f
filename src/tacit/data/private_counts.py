"""How often each category of a table occurs, released with noise that is charged.

The names of categories are declared and public; how many records have each is private. With noisy
counts, rare categories can share one input: a weight that a handful of records train learns noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Unpack

import torch
from torch import Tensor

from tacit.data.private_scaling import GaussianRelease, ReleaseOptions
from tacit.data.scaling import Scaler, as_float
from tacit.data.table_columns import Categorical
from tacit.data.table_schema import Schema

if TYPE_CHECKING:
    from tacit.accounting.events import Release

RARE_SHARE = 0.01  # of the declared number of records
_CLEAR = 4.0  # standard deviations: an empty category is below that
_CHUNK = 1 << 20  # entries at once


class Categories(NamedTuple):
    """Where a column's categories are among the entries of an input, and where "(other)" is."""

    first: int
    number: int
    other: int | None


@dataclass(frozen=True, eq=False)
class MergedCategories(Scaler):
    """Rare categories of a column share one input: that of "(other)", or of the first of them.

    Input `entries[i]` is added to input `into[i]`, and becomes 0. `counted` are the positions of
    all categories, `counts` how often each occurs, with noise; those below `threshold` are rare.
    """

    entries: Tensor
    into: Tensor
    counted: Tensor
    counts: Tensor
    threshold: float
    origin: str

    def __call__(self, inputs: Tensor) -> Tensor:
        inputs = as_float(inputs).clone()
        entries, into = self.entries.to(inputs.device), self.into.to(inputs.device)
        rare = inputs[:, entries]
        inputs[:, entries] = 0.0
        return inputs.index_add(1, into, rare)

    def describe(self) -> str:
        rare, among = int((self.counts < self.threshold).sum()), len(self.counts)
        have = "has" if rare == 1 else "have"
        return (
            f"{rare} of {among} categories {have} a noisy count below {self.threshold:g}, and rare "
            f"ones of a column share an input; the counts were {self.origin}"
        )


def categories_of(schema: Schema) -> tuple[Categories, ...]:
    """The categorical columns among the features of a schema."""
    found, start = [], 0
    for column in schema.features:
        if isinstance(column, Categorical):
            count = len(column.categories)
            other = start + count if column.unknown == "other" else None
            found.append(Categories(start, count, other))
        start += len(column.entry_names)
    return tuple(found)


def release_category_counts(
    inputs: Tensor,
    schema: Schema,
    *,
    rare_below: float | None = None,
    **options: Unpack[ReleaseOptions],
) -> tuple[MergedCategories, Release]:
    """How many records have each declared category, the stage that merges rare ones, and the event
    to charge.

    `inputs` are encoded by the schema, (N, D). With d categorical columns a record adds a vector t
    to the sum, with a one for its category in each column and zeros elsewhere; a column adds none
    where the cell is missing or no declared category. So t has at most d ones:

    - a record that is added or removed moves the sum by ‖t‖ ≤ √d;
    - one that is replaced, t by t', changes in each column no count, one, or two, by 1 each, so
      that ‖t − t'‖ ≤ √(2d). Both bounds are reached, and hold whatever the inputs are: in each
      column one entry is counted at most.

    All counts together are one Gaussian mechanism of multiplier z. Merging the categories whose
    noisy count is below `rare_below` is post-processing. By default that is 1% of the declared
    number of records, or four standard deviations of the noise if they are more. The number of
    inputs stays as it is, and what a merged category had is 0. The other options are those of
    `ReleaseOptions`.

        merged, event = tacit.data.release_category_counts(
            schema.inputs(table), schema, noise_multiplier=10, public_size=5000
        )
    """
    columns = categories_of(schema)
    if not columns:
        raise ValueError("the schema has no categorical column whose categories could be counted")
    if inputs.ndim != 2 or inputs.shape[1] != len(schema.feature_names):
        raise ValueError(
            f"inputs have shape {tuple(inputs.shape)}; give schema.inputs(table), a row per record "
            f"with {len(schema.feature_names)} entries"
        )
    if rare_below is not None and not 0 < rare_below < math.inf:
        raise ValueError(f"rare_below is {rare_below!r}; give a number of records above 0")
    release, d = GaussianRelease("category counts", **options), len(columns)
    counts, std = release.noisy(
        sum_of_categories(inputs, columns), math.sqrt(d), replaced=math.sqrt(2 * d)
    )
    usual = max(RARE_SHARE * release.public_size, _CLEAR * std)
    threshold = float(usual if rare_below is None else rare_below)
    entries, into = _merged(counts < threshold, columns)
    counted = torch.cat([torch.arange(c.first, c.first + c.number) for c in columns])
    stage = MergedCategories(entries, into, counted, counts, threshold, release.origin)
    return stage, release.event(counts)


def sum_of_categories(inputs: Tensor, columns: tuple[Categories, ...]) -> Tensor:
    """How many records have each category, column after column, *without* noise."""
    totals = [torch.zeros(column.number + 1, dtype=torch.int64) for column in columns]
    for part in inputs.split(max(1, _CHUNK // max(1, inputs.shape[1]))):
        for total, column in zip(totals, columns, strict=True):
            own = part[:, column.first : column.first + column.number].cpu().nan_to_num(0.0)
            largest, place = own.max(dim=1)
            place[largest <= 0.5] = column.number  # none of them
            total += torch.bincount(place, minlength=len(total))
    return torch.cat([total[:-1] for total in totals]).double()


def _merged(rare: Tensor, columns: tuple[Categories, ...]) -> tuple[Tensor, Tensor]:
    """Which entries are added to which others."""
    entries: list[int] = []
    into: list[int] = []
    start = 0
    for column in columns:
        own = rare[start : start + column.number].nonzero().flatten() + column.first
        start += column.number
        shared = column.other
        if shared is None and len(own):
            shared, own = int(own[0]), own[1:]
        entries += own.tolist()
        into += [shared or 0] * len(own)
    return torch.tensor(entries, dtype=torch.int64), torch.tensor(into, dtype=torch.int64)
