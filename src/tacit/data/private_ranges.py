"""The ranges of a table's columns, released with noise that is charged.

A column whose range nobody declared has to be scaled all the same: its values may be around 0.001
or around a million. `release_ranges` finds a range per column from a noisy histogram over a public
grid and from noisy moments; `ColumnRanges` is the stage that maps the columns by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from tacit.data.private_scaling import GaussianRelease, ReleaseOptions, sum_of_moments
from tacit.data.scaling import Scaler, as_float

if TYPE_CHECKING:
    from tacit.accounting.events import Release

# The grid is public: below 4^-10, then one bin for each factor of four up to 4^21, for both signs.
_FACTOR, _LEAST, _SIZES = 4.0, -10, 31
NUM_BINS = 2 * _SIZES + 1
# In standard deviations of the noise: how high the fullest size must be, and what adjoins it.
_CLEAR, _NEIGHBOUR = 3.5, 2.0
_USUAL = 4.0  # (−4, 4) for a column without a clear size, as if somebody had standardised it
_ONE_SIGN = 0.2  # a column has one sign if less than this share has the other
_CHUNK = 1 << 20  # values at once
_STDS = 3.0  # the range reaches from the mean to this many standard deviations on each side


@dataclass(frozen=True, eq=False)
class ColumnRanges(Scaler):
    """Clips some entries of each input to [lower, upper], and maps that range onto [-1, 1].

    `entries` are their positions; the other entries stay as they are. A value that is not finite,
    such as a missing one, becomes 0, the middle.
    """

    entries: Tensor
    lower: Tensor
    upper: Tensor
    origin: str

    def __call__(self, inputs: Tensor) -> Tensor:
        inputs = as_float(inputs).clone()
        entries = self.entries.to(inputs.device)
        values = inputs[:, entries].double()
        lower, upper = self.lower.to(values), self.upper.to(values)
        unit = 2 * (values.clamp(lower, upper) - lower) / (upper - lower) - 1
        inputs[:, entries] = torch.where(values.isfinite(), unit, 0.0).to(inputs.dtype)
        return inputs

    def describe(self) -> str:
        count = len(self.entries)
        were = "1 input was" if count == 1 else f"{count} inputs were each"
        return f"{were} clipped to a range and mapped onto [-1, 1]; its bounds were {self.origin}"


def release_ranges(
    inputs: Tensor, entries: Sequence[int] | None = None, **options: Unpack[ReleaseOptions]
) -> tuple[ColumnRanges, Release]:
    """A range for each of d entries of the inputs (N, D), and the event to charge.

    Two noisy sums, together one Gaussian mechanism of multiplier z (`GaussianRelease`):

    1. A histogram. Each finite value adds 1 to one of B bins of its column: around 0, or of the
       values of one sign between 4^k and 4^(k+1). So a record adds a vector t with d ones at most,
       ‖t‖ ≤ √d. A record that is added or removed moves the sum by at most Δ = √d, and one that is
       replaced by at most √(2d): in each column one count falls and one rises, or none does.
       A column's first range goes from its fullest size outwards, to both signs unless the values
       clearly have one. Where no size stands out of the noise it is (−4, 4).
    2. The moments of each column within that range, as in `release_statistics`: Δ = √d, or 2√d for
       a replacement. The range becomes mean ± 3 standard deviations, cut to the first one.

    Both are post-processing of the two sums. What lies outside of a range is clipped, which biases
    inputs and never the guarantee. The options are those of `ReleaseOptions`.

        ranges, event = tacit.data.release_ranges(x, noise_multiplier=5, public_size=10_000)
        trainer = tacit.Trainer(..., ledger=tacit.LedgerRun(prelude=(event,)))
    """
    if inputs.ndim != 2:
        raise ValueError(f"inputs have shape {tuple(inputs.shape)}; give one row per record")
    positions = torch.arange(inputs.shape[1]) if entries is None else torch.tensor(list(entries))
    if not len(positions):
        raise ValueError("there is no entry whose range could be released; give at least one")
    columns = inputs[:, positions.to(inputs.device)]
    d = len(positions)
    release = GaussianRelease("column ranges", num_sums=2, **options)
    counts, std = release.noisy(
        sum_of_bins(columns), math.sqrt(d), ", bins", replaced=math.sqrt(2 * d)
    )
    lower, upper = ranges_of(counts, std)
    middle, half = (lower + upper) / 2, (upper - lower) / 2
    moments, std = release.noisy(sum_of_moments(columns, middle, half), math.sqrt(d), ", moments")
    mean, second = moments / release.public_size
    mean = mean.clamp(-1, 1)
    floor = min(1.0, std / release.public_size)
    reach = _STDS * (1 + second - mean**2).clamp(max=1.0).clamp(min=floor).sqrt()
    lower, upper = (
        middle + half * (mean - reach).clamp(min=-1),
        middle + half * (mean + reach).clamp(max=1),
    )
    stage = ColumnRanges(positions, lower, upper, release.origin)
    return stage, release.event(torch.cat([counts.flatten(), moments.flatten()]))


def sum_of_bins(columns: Tensor) -> Tensor:
    """How many values of each column are in each bin, as (d, B), *without* noise."""
    d = columns.shape[1]
    offsets = torch.arange(d) * (NUM_BINS + 1)
    total = torch.zeros(d * (NUM_BINS + 1), dtype=torch.int64)
    for part in columns.split(max(1, _CHUNK // max(1, d))):
        places = _bins(part.cpu().double()) + offsets
        total += torch.bincount(places.flatten(), minlength=len(total))
    return total.view(d, NUM_BINS + 1)[:, :-1].double()  # of each column the last is of no bin


def _bins(values: Tensor) -> Tensor:
    """The bin of each value, from the most negative up; B, one past the last, for none."""
    sizes = values.abs()
    power = (torch.log2(sizes) / math.log2(_FACTOR)).floor()
    size = (power - _LEAST + 1).clamp(0, _SIZES)  # 0 is the bin around zero
    found = _SIZES + torch.where(values < 0, -size, size)
    return torch.where(values.isfinite(), found, NUM_BINS).long()


def bin_ends() -> tuple[Tensor, Tensor]:
    """The lower and the upper end of each bin."""
    powers = _FACTOR ** torch.arange(_LEAST, _LEAST + _SIZES + 1, dtype=torch.float64)
    edges = torch.cat([-powers.flip(0), powers])
    return edges[:-1], edges[1:]


def ranges_of(counts: Tensor, std: float) -> tuple[Tensor, Tensor]:
    """The range of each column, from noisy counts (d, B) whose noise has this deviation."""
    ends = [_range_of(row, std) for row in counts.tolist()]
    lower, upper = torch.tensor(ends, dtype=torch.float64).T
    return lower, upper


def _range_of(counts: list[float], std: float) -> tuple[float, float]:
    """From the fullest size outwards, as long as sizes hold more than noise.

    It is (−b, b) unless the values clearly have one sign: a range that is too wide costs accuracy,
    and one that cuts half of the values off costs the column.
    """
    near_zero = counts[_SIZES]
    positive, negative = counts[_SIZES + 1 :], counts[:_SIZES][::-1]
    both = [p + n for p, n in zip(positive, negative, strict=True)]
    noise = math.sqrt(2) * std
    first = last = max(range(_SIZES), key=both.__getitem__)
    if both[first] < _CLEAR * noise:
        return -_USUAL, _USUAL
    while last + 1 < _SIZES and both[last + 1] > _NEIGHBOUR * noise:
        last += 1
    while first > 0 and both[first - 1] > _NEIGHBOUR * noise:
        first -= 1
    some = _NEIGHBOUR * std * math.sqrt(last + 1 - first)
    total = sum(both[first : last + 1])
    smallest = 0.0 if near_zero > _NEIGHBOUR * std else _FACTOR ** (_LEAST + first)
    largest = _FACTOR ** (_LEAST + last + 1)
    if sum(negative[first : last + 1]) + some < _ONE_SIGN * total:
        return smallest, largest
    if sum(positive[first : last + 1]) + some < _ONE_SIGN * total:
        return -largest, -smallest
    return -largest, largest
