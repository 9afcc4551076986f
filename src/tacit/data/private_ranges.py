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

from tacit.data.private_scaling import (
    GaussianRelease,
    ReleaseOptions,
    sum_of_moments,
)
from tacit.data.scaling import Scaler, as_float

if TYPE_CHECKING:
    from tacit.accounting.events import Release

# The grid is public: 0 ± 2^-20, then one bin for each factor of two up to 2^41, for both signs.
_LEAST, _MOST = -20, 40
_OCTAVES = _MOST - _LEAST + 1
NUM_BINS = 2 * _OCTAVES + 1
_FALSE_BINS = 0.05  # expected number of empty bins, of all columns, that noise makes look full
_NEIGHBOUR = 2.0  # standard deviations that a bin next to a full one must have
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
        return (
            f"{len(self.entries)} inputs were each clipped to a range and mapped onto [-1, 1]; the "
            f"ranges were {self.origin}"
        )


def release_ranges(
    inputs: Tensor, entries: Sequence[int] | None = None, **options: Unpack[ReleaseOptions]
) -> tuple[ColumnRanges, Release]:
    """A range for each of d entries of the inputs (N, D), and the event to charge.

    Two noisy sums, together one Gaussian mechanism of multiplier z (`GaussianRelease`):

    1. A histogram. Each finite value adds 1 to one of B bins of its column: around 0, or of the
       values of one sign between 2^k and 2^(k+1). So a record adds a vector t with d ones at most,
       ‖t‖ ≤ √d. A record that is added or removed moves the sum by at most Δ = √d, and one that is
       replaced by at most √(2d): in each column one count falls and one rises, or none does.
       Full bins are those that noise alone would hardly make so high, the highest one, and what
       adjoins them; the hull of a column's full bins is its first range.
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
    first, last = full_bins(counts, std)
    low, high = bin_ends()
    lower, upper = low[first], high[last]
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
    octave = (torch.frexp(sizes)[1] - _LEAST).clamp(max=_OCTAVES)
    octave = torch.where(sizes < 2.0**_LEAST, 0, octave)  # 0 is the bin around zero
    found = _OCTAVES + torch.where(values < 0, -octave, octave)
    return torch.where(values.isfinite(), found, NUM_BINS).long()


def bin_ends() -> tuple[Tensor, Tensor]:
    """The lower and the upper end of each bin."""
    powers = 2.0 ** torch.arange(_LEAST, _MOST + 2, dtype=torch.float64)
    edges = torch.cat([-powers.flip(0), powers])
    return edges[:-1], edges[1:]


def full_bins(counts: Tensor, std: float) -> tuple[Tensor, Tensor]:
    """The first and the last full bin of each column, from noisy counts (d, B)."""
    d = len(counts)
    quantile = 1 - min(0.5, _FALSE_BINS / (d * NUM_BINS))
    threshold = std * torch.special.ndtri(torch.tensor(quantile, dtype=torch.float64))
    full = (counts > threshold) | (counts == counts.amax(dim=1, keepdim=True))
    likely = counts > _NEIGHBOUR * std
    for _ in range(NUM_BINS):
        beside = torch.zeros_like(full)
        beside[:, 1:] |= full[:, :-1]
        beside[:, :-1] |= full[:, 1:]
        beside |= full.flip(1)  # the same size with the other sign
        grown = full | (beside & likely)
        if bool((grown == full).all()):
            break
        full = grown
    index = torch.arange(NUM_BINS).expand_as(full)
    return torch.where(full, index, NUM_BINS).amin(1), torch.where(full, index, -1).amax(1)
