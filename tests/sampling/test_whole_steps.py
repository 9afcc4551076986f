"""A run has a whole number of steps, whoever draws them."""

import numpy as np
import pytest
import torch

import tacit

RECORDS = tacit.Records(torch.randn(12, 2), torch.zeros(12, dtype=torch.long), public_size=12)
SAMPLERS = [
    lambda steps: tacit.PoissonSampler(RECORDS, 0.5, steps),
    lambda steps: tacit.FixedSizeSampler(RECORDS, 3, steps),
    lambda steps: tacit.ShuffleSampler(RECORDS, 3, steps),
    lambda steps: tacit.MiniSetSampler(RECORDS, 3, steps, chosen=2),
]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [2.5, 2.0, -1, "2", None, True, float("nan")])
def test_steps_that_are_no_whole_number_are_refused(sampler, steps):
    with pytest.raises(ValueError, match=r"steps is .*; give a whole number, 0 or more"):
        sampler(steps)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [0, 3, np.int64(3)])
def test_whole_numbers_are_drawn(sampler, steps):
    drawn = list(sampler(steps))
    assert len(drawn) == steps
