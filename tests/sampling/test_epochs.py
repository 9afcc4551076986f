"""`epochs=` is a number of steps, from declared constants alone."""

from __future__ import annotations

import math

import pytest
import torch

import tacit
from tacit import Records


def records(num=100, size=200) -> Records:
    return Records(torch.zeros(num, 1), torch.zeros(num), public_size=size, num_ids=size)


@pytest.mark.parametrize(
    ("sampler", "steps"),
    [
        (lambda **kw: tacit.PoissonSampler(records(), 0.1, **kw), 30),
        (lambda **kw: tacit.PoissonSampler(records(), expected_batch_size=10, **kw), 60),
        (lambda **kw: tacit.FixedSizeSampler(records(), 10, **kw), 30),
        (lambda **kw: tacit.ShuffleSampler(records(), 30, **kw), 12),
        (lambda **kw: tacit.MiniSetSampler(records(), 4, chosen=5, **kw), 30),
        (lambda **kw: tacit.MiniSetSampler(records(), 4, rate=0.25, **kw), 12),
    ],
)
def test_every_sampler_takes_epochs(sampler, steps):
    made = sampler(epochs=3)
    assert made.steps == len(made) == steps
    assert made.scheme.epochs(made.steps) == pytest.approx(3)
    with pytest.raises(ValueError, match="both steps and epochs"):
        sampler(epochs=3, steps=4)
    for wrong in (0, -1, math.inf, math.nan, "3", [2]):
        with pytest.raises(ValueError, match="epochs is"):
            sampler(epochs=wrong)


def test_the_number_of_records_is_not_read():
    for count in (3, 190):
        sampler = tacit.PoissonSampler(records(count), expected_batch_size=10, epochs=2)
        assert sampler.steps == 40


def test_part_of_a_step_is_one():
    assert tacit.PoissonSampler(records(), 0.5, epochs=0.001).steps == 1
