"""Random subsets by gaps: the same law as a coin for each, at the price of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tacit.sampling.draws import bernoulli_indices, subset_indices

RARE = 1e-7  # a fair draw fails a test this rarely


@settings(deadline=None)
@given(
    st.integers(0, 3000),
    st.floats(1e-12, 1.0, exclude_min=False),
    st.integers(0, 2**32 - 1),
)
def test_indices_are_sorted_different_and_in_range(num, rate, seed):
    indices = bernoulli_indices(num, rate, np.random.default_rng(seed))
    assert indices.dtype == np.int64
    assert (np.diff(indices) > 0).all()
    assert len(indices) == 0 or (indices[0] >= 0 and indices[-1] < num)


@pytest.mark.parametrize("num", [1, 2, 17])
@pytest.mark.parametrize("rate", [0.05, 0.2, 0.3])
def test_first_and_last_are_as_likely_as_the_rest(num, rate):
    """Gaps that start, or stop, one too late would starve an end."""
    generator = np.random.default_rng(4)
    counts = np.zeros(num)
    draws = 20_000
    for _ in range(draws):
        counts[bernoulli_indices(num, rate, generator)] += 1
    for count in counts:
        assert stats.binomtest(int(count), draws, rate).pvalue > RARE


@pytest.mark.parametrize(("num", "rate"), [(10**12, 1e-9), (10**6, 0.01), (10**6, 0.2)])
def test_a_large_draw_is_uniform_and_of_the_right_size(num, rate):
    indices = bernoulli_indices(num, rate, np.random.default_rng(2))
    expected = num * rate
    assert abs(len(indices) - expected) < 6 * math.sqrt(expected)
    assert stats.kstest(indices / num, "uniform").pvalue > RARE


@pytest.mark.parametrize("rate", [1e-9, 1e-18, 5e-324])
def test_tiny_rates_neither_overflow_nor_hang(rate):
    assert len(bernoulli_indices(10**6, rate, np.random.default_rng(0))) <= 1


def test_nobody_of_nobody():
    assert len(bernoulli_indices(0, 0.5, np.random.default_rng(0))) == 0


def test_all_subsets_are_equally_likely():
    generator = np.random.default_rng(0)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(20_000):
        subset = tuple(sorted(subset_indices(5, 2, generator).tolist()))
        counts[subset] = counts.get(subset, 0) + 1
    assert len(counts) == math.comb(5, 2)
    assert stats.chisquare(list(counts.values())).pvalue > RARE
