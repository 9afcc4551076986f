"""A set's vector is no longer than its constant, however many equal entries it has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tacit
from tacit.queries import SetBySet

torch.set_num_threads(1)


class Constant(nn.Module):
    """Its gradient has the same number in every entry."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return x.sum(1, keepdim=True) * self.weight.sum()


@pytest.mark.parametrize(
    "gradient", [None, tacit.queries.LocalRun(lambda p: torch.optim.SGD(p, lr=0.7))]
)
@pytest.mark.parametrize("size", [10**6, 4 * 10**6])
def test_a_long_vector_of_equal_numbers_is_clipped(size: int, gradient) -> None:
    """PyTorch's own float32 norm of it is too small by a tenth of a percent, and by more."""
    records = tacit.Records(torch.full((4, 2), 0.4871), torch.zeros(4), public_size=4)
    batch = tacit.MiniSetSampler(records, 4, steps=1, rate=1.0, seed=0).next_batch()
    query = tacit.BatchClip(1.0, 4, gradient=gradient, engine=SetBySet())
    found = query(Constant(size), lambda outputs, targets: outputs.sum(), batch)
    (block,) = found.blocks
    assert float(block.sums[0].double().norm()) <= 1.0
