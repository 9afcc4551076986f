"""Fixed size: exactly so many each step, and whoever is in makes it less likely for the others."""

from __future__ import annotations

import math

import pytest
import torch
from participation import SIGMAS, mean_covariance, participation, rate_is_off

from tacit import FixedSizeSampler, PoissonSampler, Records

NUM, SIZE, STEPS = 20, 8, 12_000
RATE = SIZE / NUM
EXPECTED_COVARIANCE = -RATE * (1 - RATE) / (NUM - 1)


def records(num=NUM) -> Records:
    return Records(torch.zeros(num, 1), torch.zeros(num), public_size=num)


@pytest.fixture(scope="module")
def took_part():
    return participation(FixedSizeSampler(records(), SIZE, seed=3), STEPS)


def test_every_batch_has_the_size(took_part):
    assert set(took_part.sum(axis=1)) == {SIZE}


def test_marginal_probability(took_part):
    assert not rate_is_off(took_part, RATE)


@pytest.mark.parametrize("shift", [1, 7])
def test_records_exclude_each_other(took_part, shift):
    std = RATE * (1 - RATE) / math.sqrt(took_part.size / 2)
    assert abs(mean_covariance(took_part, shift) - EXPECTED_COVARIANCE) < SIGMAS * std


def test_independent_draws_are_told_apart():
    poisson = participation(PoissonSampler(records(), RATE, seed=3), STEPS)
    std = RATE * (1 - RATE) / math.sqrt(poisson.size / 2)
    assert abs(mean_covariance(poisson, 1) - EXPECTED_COVARIANCE) > SIGMAS * std


def test_all_of_them():
    assert participation(FixedSizeSampler(records(), NUM), 3).all()


@pytest.mark.parametrize("size", [0, -1, NUM + 1])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match="sample"):
        FixedSizeSampler(records(), size)
