"""A record whose numbers overflow does not change what the others add."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tacit
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import batch_of


class Distances(nn.Module):
    """`cdist` has no rule, so its backward pass runs once per record, on what all have saved."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 4))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cdist(rows, self.centres)


class Bags(nn.Module):
    """The maximum of each bag has no rule either, but a look-up cannot overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer((rows * self.scale).exp())


def first_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().sum(1)


@pytest.mark.parametrize("build", [Distances, Bags])
@pytest.mark.parametrize("large", [float("inf"), 1e30])
def test_the_others_stay(build, large):
    torch.manual_seed(0)
    model, rows = build(), torch.randn(5, 4)
    query = tacit.PerSampleClip(max_norm=0.1)

    def sums(rows: Tensor) -> list[Tensor]:
        batch = batch_of(rows, torch.zeros(len(rows)), divisor=1.0, scheme=Poisson(0.5))
        (block,) = query(model, first_output, batch).blocks
        return [total.clone() for total in block.sums]

    sums(rows)
    without = sums(rows[1:])
    rows[0] = large
    with_it = sums(rows)
    for a, b in zip(without, with_it, strict=True):
        assert b.isfinite().all()
        assert float((a - b).norm()) <= 0.1 * 1.001
