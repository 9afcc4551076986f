"""Rates and divisors are declared. They are never read off the data, which is private."""

from __future__ import annotations

import math

import pytest
import torch

from tacit import MiniSetSampler, PoissonSampler, Records
from tacit.errors import UndeclaredConstant


def undeclared(num=10) -> Records:
    return Records(torch.zeros(num, 1), torch.zeros(num))


@pytest.mark.parametrize("given", [{"sampling_rate": 0.1}, {"expected_batch_size": 2}])
def test_poisson_needs_a_declared_size_to_derive_one_from_the_other(given):
    with pytest.raises(UndeclaredConstant, match="public_size"):
        PoissonSampler(undeclared(), **given)


def test_poisson_with_both_constants_needs_no_size():
    sampler = PoissonSampler(undeclared(), 0.25, expected_batch_size=3.5)
    assert sampler.scheme.rate == 0.25
    assert sampler.next_batch().divisor == 3.5


def test_poisson_with_neither_is_refused():
    with pytest.raises(ValueError, match="sampling_rate"):
        PoissonSampler(undeclared())


def test_mini_sets_need_a_declared_size():
    with pytest.raises(UndeclaredConstant, match="public_size"):
        MiniSetSampler(undeclared(), 2, chosen=1)


def test_the_rate_follows_the_declared_size_and_not_the_real_one():
    few = Records(torch.zeros(3, 1), torch.zeros(3), public_size=100)
    assert PoissonSampler(few, expected_batch_size=20).scheme.rate == 0.2
    assert PoissonSampler(few, 0.2).expected_batch_size == 20


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0001, math.nan, math.inf])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(ValueError, match="rate"):
        PoissonSampler(undeclared(), rate, expected_batch_size=5)


@pytest.mark.parametrize("size", [0, -3, math.nan, math.inf])
def test_a_divisor_that_is_not_positive_is_refused(size):
    with pytest.raises(ValueError, match="expected_batch_size"):
        PoissonSampler(undeclared(), 0.5, expected_batch_size=size)


@pytest.mark.parametrize(
    "wrong",
    [{"chosen": 0}, {"chosen": 6}, {"rate": 0.0}, {"rate": 1.5}, {}, {"chosen": 1, "rate": 0.5}],
)
def test_impossible_mini_sets_are_refused(wrong):
    data = Records(torch.zeros(10, 1), torch.zeros(10), public_size=10)
    with pytest.raises(ValueError, match=r"chosen|rate"):
        MiniSetSampler(data, 2, **wrong)


@pytest.mark.parametrize("set_size", [0, -2])
def test_an_impossible_set_size_is_refused_by_name(set_size):
    data = Records(torch.zeros(10, 1), torch.zeros(10), public_size=10)
    with pytest.raises(ValueError, match="set_size"):
        MiniSetSampler(data, set_size, chosen=1)
