"""Noise: who gets how much, at one joint multiplier; and where the randomness comes from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit import GlobalNoise, OptimisedNoise, PerLayerNoise
from tacit.noise import joint_noise_multiplier

torch.set_num_threads(1)

CPU = torch.device("cpu")
ALLOCATIONS = [GlobalNoise(), PerLayerNoise(), OptimisedNoise()]

positive = st.floats(1e-6, 1e6)
some_blocks = st.lists(st.tuples(positive, st.integers(1, 10**8), positive), min_size=1, max_size=9)


@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=lambda a: type(a).__name__)
@settings(deadline=None)
@given(blocks=some_blocks, z=st.floats(1e-3, 1e3))
def test_the_joint_multiplier_is_the_one_that_was_asked_for(allocation, blocks, z):
    sensitivities, sizes, _ = zip(*blocks, strict=True)
    stds = allocation(sensitivities, sizes, z)
    assert math.isclose(joint_noise_multiplier(sensitivities, stds), z, rel_tol=1e-12)


@settings(deadline=None)
@given(blocks=some_blocks, z=st.floats(1e-3, 1e3))
def test_weights_do_not_change_the_joint_multiplier(blocks, z):
    sensitivities, sizes, weights = zip(*blocks, strict=True)
    stds = OptimisedNoise(weights)(sensitivities, sizes, z)
    assert math.isclose(joint_noise_multiplier(sensitivities, stds), z, rel_tol=1e-12)


@settings(deadline=None)
@given(blocks=some_blocks, seed=st.integers(0, 2**32 - 1), spread=st.floats(1e-3, 3))
def test_the_optimised_allocation_is_the_best_of_all_feasible_ones(blocks, seed, spread):
    """Σ w n s² against random allocations, near and far, brought to the same multiplier."""
    sensitivities, sizes, weights = map(np.array, zip(*blocks, strict=True))
    ours = np.array(OptimisedNoise(tuple(weights))(sensitivities, sizes, 1.0))
    cost = (weights * sizes * ours**2).sum()
    generator = np.random.default_rng(seed)
    for _ in range(20):
        other = ours * np.exp(spread * generator.standard_normal(len(ours)))
        other /= joint_noise_multiplier(sensitivities, other)
        assert cost <= (weights * sizes * other**2).sum() * (1 + 1e-9)


def test_the_optimum_is_unlike_the_others_where_sizes_differ():
    sensitivities, sizes = [1.0, 1.0], [10**6, 10]

    def power(stds):
        return sum(n * s * s for n, s in zip(sizes, stds, strict=True))

    costs = [power(allocation(sensitivities, sizes, 1.0)) for allocation in ALLOCATIONS]
    assert costs[2] < 0.6 * min(costs[:2])


def test_shapes_of_the_other_two():
    assert GlobalNoise()([3.0, 4.0], [1, 1], 2.0) == [10.0, 10.0]
    assert PerLayerNoise()([3.0, 4.0], [1, 1], 2.0) == pytest.approx(
        [2 * math.sqrt(2) * 3, 2 * math.sqrt(2) * 4]
    )


@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=lambda a: type(a).__name__)
def test_a_block_that_nobody_can_move_costs_the_others_nothing(allocation):
    stds = allocation([1.0, 0.0, 2.0], [5, 5, 5], 1.5)
    assert math.isclose(joint_noise_multiplier([1.0, 0.0, 2.0], stds), 1.5, rel_tol=1e-12)


def test_the_joint_multiplier_of_a_block_without_noise_is_zero():
    assert joint_noise_multiplier([1.0, 1.0], [1e9, 0.0]) == 0.0
    assert joint_noise_multiplier([0.0, 2.0], [0.0, 6.0]) == 3.0
    assert joint_noise_multiplier([3.0, 4.0], [1.0, 1.0]) == pytest.approx(1 / 5)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, -1.0), (1.0, 0.0), (1.0, math.nan)])
def test_weights_that_make_no_sense_are_refused(weights):
    with pytest.raises(ValueError, match="weight"):
        OptimisedNoise(weights)([1.0, 1.0], [1, 1], 1.0)
