"""Models that fill in missing values from other records, and backward passes that mix records."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tacit
from tacit.errors import MixesRecords

LOSS = tacit.losses.CrossEntropy()


class FillsIn(nn.Module):
    """Missing values become the mean of the batch's others, or of the record's own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(4, 2), own

    def forward(self, x):
        mean = torch.nanmean(x, 1 if self.own else 0, keepdim=True).nan_to_num()
        return self.layer(torch.where(x.isnan(), mean, x))


class Remembers(FillsIn):
    """Missing values become a mean that is kept from pass to pass."""

    def __init__(self) -> None:
        super().__init__(own=True)
        self.mean = torch.zeros(4)

    def forward(self, x):
        if x.isnan().any():
            self.mean = 0.9 * self.mean + 0.1 * torch.nanmean(x, 0).nan_to_num().detach()
        return self.layer(torch.where(x.isnan(), self.mean, x))


def batch(size: int | None, share: float):
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    for row in range(int(24 * share)):
        x[row, row % 4] = torch.nan
    scheme = tacit.sampling.Poisson(0.5)
    return tacit.sampling.batch_of(
        x, torch.arange(24) % 2, divisor=12.0, scheme=scheme, max_physical=size
    )


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("size", [None, 2, 1])
def test_what_is_filled_in_from_others_is_refused(size, share):
    with pytest.raises(MixesRecords, match="records meet"):
        tacit.PerSampleClip(1.0)(FillsIn(own=False), LOSS, batch(size, share))
    with pytest.raises(MixesRecords, match=r"stateful|records meet|read values"):
        tacit.PerSampleClip(1.0)(Remembers(), LOSS, batch(size, share))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_is_filled_in_from_the_record_itself_is_not(share):
    (block,) = tacit.PerSampleClip(1.0)(FillsIn(own=True), LOSS, batch(None, share)).blocks
    assert all(s.isfinite().all() for s in block.sums)


def test_missing_values_that_a_model_does_not_know_add_nothing():
    (block,) = tacit.PerSampleClip(1.0)(nn.Linear(4, 2), LOSS, batch(None, 0.5)).blocks
    assert all(s.isfinite().all() for s in block.sums)
    assert float(block.sums[0].norm()) > 0


class Shortens(torch.autograd.Function):
    """The identity, whose way back scales all rows by the norm of all of them."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (4 / g.norm()).clamp(max=1)


class MixesBackwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(Shortens.apply(self.first(x)))


@pytest.mark.parametrize("size", [None, 1])
def test_cotangents_that_meet_only_when_they_are_large_are_refused(size):
    with pytest.raises(MixesRecords):
        tacit.PerSampleClip(1.0)(MixesBackwards(), LOSS, batch(size, 0.0))
