"""Poisson: every record decides for itself, with the declared probability, afresh each step."""

from __future__ import annotations

import math

import pytest
import torch
from participation import (
    SIGMAS,
    mean_covariance,
    participation,
    rate_is_off,
    size_variance_is_off,
)

from tacit import FixedSizeSampler, PoissonSampler, Records

NUM, STEPS = 500, 3000
# Gaps are drawn up to a rate of 0.2, coins above it.
RATES = [0.03, 0.2, 0.21, 0.5, 0.97]


def records(num=NUM) -> Records:
    return Records(torch.zeros(num, 1), torch.zeros(num), public_size=num)


@pytest.fixture(scope="module", params=RATES)
def drawn(request):
    rate = request.param
    return rate, participation(PoissonSampler(records(), rate, seed=11), STEPS)


def test_marginal_probability(drawn):
    rate, took_part = drawn
    assert not rate_is_off(took_part, rate)


@pytest.mark.parametrize("error", [0.97, 1.03])
@pytest.mark.parametrize("rate", [0.03, 0.2, 0.21, 0.5])
def test_a_rate_that_is_three_percent_off_is_caught(rate, error):
    took_part = participation(PoissonSampler(records(), error * rate, seed=11), STEPS)
    assert rate_is_off(took_part, rate)


def test_variance_of_the_batch_size(drawn):
    rate, took_part = drawn
    assert not size_variance_is_off(took_part, rate)


def test_a_fixed_batch_size_is_caught():
    sampler = FixedSizeSampler(records(), batch_size=100, seed=11)
    assert size_variance_is_off(participation(sampler, 500), rate=0.2)


@pytest.mark.parametrize("shift", [1, 2, 250])
def test_records_are_uncorrelated(drawn, shift):
    rate, took_part = drawn
    std = rate * (1 - rate) / math.sqrt(took_part.size / 2)
    assert abs(mean_covariance(took_part, shift)) < SIGMAS * std


def test_steps_are_uncorrelated(drawn):
    rate, took_part = drawn
    centred = took_part - rate
    std = rate * (1 - rate) / math.sqrt(took_part[1:].size)
    assert abs((centred[1:] * centred[:-1]).mean()) < SIGMAS * std


def test_rate_one_takes_everyone():
    assert participation(PoissonSampler(records(), 1.0), 5).all()


def test_a_tiny_rate_takes_hardly_anyone():
    took_part = participation(PoissonSampler(records(), 1e-9), 2000)
    assert took_part.sum() <= 1  # the chance of two is 5·10^-7
