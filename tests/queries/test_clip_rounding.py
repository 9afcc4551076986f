"""The bound holds for the floating-point numbers that are really added, not only on paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tacit import PerSampleClip
from tacit.sampling import Poisson, batch_of

torch.set_num_threads(1)


class Dot(nn.Module):
    """⟨w, x⟩: a record's gradient is the record itself, so a test can choose it."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x):
        return x @ self.w


def output_itself(outputs, targets):
    return outputs.sum()


def clipped_sum(gradients, max_norm, max_physical=None):
    """The query's sum for records with these gradients, in float64."""
    model = Dot(gradients.shape[1], gradients.dtype)
    targets = torch.zeros(len(gradients))
    batch = batch_of(
        gradients, targets, divisor=1.0, scheme=Poisson(0.5), max_physical=max_physical
    )
    (block,) = PerSampleClip(max_norm)(model, output_itself, batch).blocks
    return block.sums[0].double()


def exact_norm(vector) -> np.longdouble:
    """torch's own norm of a million float64 numbers is 10^4 roundings off; this one is not."""
    return np.sqrt(np.square(vector.numpy().astype(np.longdouble)).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 1000, 1_000_003])
def test_one_record_never_exceeds_the_bound_by_a_rounding(size, dtype):
    torch.manual_seed(0)
    for value in (0.1, 0.7, 1.1, 1e10, 1e-10):
        constant = torch.full((1, size), value, dtype=dtype)
        assert exact_norm(clipped_sum(constant, 0.1 * value)) <= 0.1 * value
    for _ in range(3):
        assert exact_norm(clipped_sum(torch.randn(1, size, dtype=dtype), 0.5)) <= 0.5


@pytest.mark.parametrize("scale", [1e-3, 1e3, 1e15])
def test_a_record_above_the_bound_is_scaled_down_to_it_and_keeps_its_direction(scale):
    torch.manual_seed(0)
    gradient = scale * torch.randn(1, 50)
    total = clipped_sum(gradient, 1e-4)
    assert total.norm() >= 1e-4 * (1 - 1e-5)
    cosine = torch.nn.functional.cosine_similarity(total, gradient[0].double(), dim=0)
    assert cosine > 1 - 1e-6


def test_a_record_below_the_bound_is_not_changed_at_all():
    gradient = torch.tensor([[0.3, -0.4]])
    assert torch.equal(clipped_sum(gradient, 1.0), gradient[0].double())


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 1e-24), (torch.float64, 1e-170)])
def test_a_bound_so_small_that_squares_underflow_below_it_is_refused(dtype, value):
    """‖g‖² = 0 in floating point for a g that is far above this max_norm."""
    gradient = torch.full((1, 1000), value, dtype=dtype)
    with pytest.raises(ValueError, match="at least"):
        clipped_sum(gradient, 1e-3 * value)
    assert float(clipped_sum(gradient, 1e-12).norm()) <= 1e-12


def test_squares_that_overflow_still_leave_a_bounded_record():
    assert clipped_sum(torch.full((1, 10), 1e30), 0.5).norm() <= 0.5


def test_adding_a_record_to_a_long_float32_sum_moves_it_by_the_bound():
    """20,000 aligned records: one more shifts the others between pieces, and their roundings.

    [Casacuberta 2022]: the sensitivity of a floating-point sum is not that of the sum.
    """
    torch.manual_seed(0)
    gradients = 1 + 0.1 * torch.rand(20_001, 100)
    before = clipped_sum(gradients[1:], 1.0, max_physical=64)
    after = clipped_sum(gradients, 1.0, max_physical=64)
    # Sums of 64 records are rounded to float32, and added up in float64.
    assert (after - before).norm() <= 1 + 1e-4
