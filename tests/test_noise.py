"""Noise: who gets how much, at one joint multiplier; and where the randomness comes from."""

from __future__ import annotations

import copy
import math
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit import GlobalNoise, OptimisedNoise, PerLayerNoise
from tacit.noise import NoiseSource, generator_for, joint_noise_multiplier

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


def test_draws_are_standard_normal_and_white():
    draws = NoiseSource().normal(1_000_000, CPU, torch.float64)
    assert abs(draws.mean()) < 6e-3
    assert abs(draws.std() - 1) < 5e-3
    assert abs((draws**4).mean() - 3) < 0.06
    assert abs((draws[1:] * draws[:-1]).mean()) < 6e-3


def one_draw(source: NoiseSource) -> list[float]:
    return source.normal(6, CPU, torch.float32).tolist()


def test_one_seed_one_sequence_and_it_goes_on():
    one, other = NoiseSource(5), NoiseSource(5)
    first = one_draw(one)
    assert first == one_draw(other)
    assert first != one_draw(one)
    assert first != one_draw(NoiseSource(6))


def test_no_seed_never_the_same_even_if_torch_is_seeded():
    torch.manual_seed(0)
    one = one_draw(NoiseSource())
    torch.manual_seed(0)
    assert one != one_draw(NoiseSource())


def test_noise_does_not_disturb_torchs_own_generator():
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    one_draw(NoiseSource())
    assert torch.equal(torch.randn(3), expected)


def mersenne_words(generator: torch.Generator) -> np.ndarray:
    return generator.get_state()[24 : 24 + 8 * 624].numpy().view(np.uint64)


def from_some_32_bit_seed(generator: torch.Generator) -> bool:
    """Whether any of the 2^32 seeds gives this state. A seeded twister's first word is its seed."""
    words = mersenne_words(generator)
    seeded = torch.Generator().manual_seed(int(words[0]))
    return np.array_equal(words, mersenne_words(seeded))


def test_an_unseeded_generator_has_more_than_32_bits():
    generator = generator_for("cpu", None)
    assert not from_some_32_bit_seed(generator)
    reported = torch.Generator().manual_seed(generator.initial_seed())
    assert (mersenne_words(generator) != mersenne_words(reported)).mean() > 0.99
    assert mersenne_words(generator).max() < 2**32
    assert len(np.unique(mersenne_words(generator))) > 600


def test_the_check_sees_a_generator_that_has_32_bits():
    assert from_some_32_bit_seed(torch.Generator().manual_seed(2**40 + 12345))
    assert from_some_32_bit_seed(generator_for("cpu", 77))


def in_forked_child(function) -> str:
    """What `function` returns, or raises, when it is run in a forked process."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = repr(function())
        except BaseException as error:
            answer = type(error).__name__
        os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


def test_a_forked_child_does_not_repeat_its_parents_noise():
    source = NoiseSource()
    one_draw(source)
    children = [in_forked_child(lambda: one_draw(source)) for _ in range(2)]
    assert len({repr(one_draw(source)), *children}) == 3


def test_a_seeded_source_refuses_to_be_forked():
    source = NoiseSource(1)
    one_draw(source)
    assert in_forked_child(lambda: one_draw(source)) == "RuntimeError"


def test_the_fork_test_sees_a_generator_that_repeats_itself():
    generator = torch.Generator().manual_seed(0)
    in_child = in_forked_child(lambda: torch.randn(6, generator=generator).tolist())
    assert in_child == repr(torch.randn(6, generator=generator).tolist())


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda source: pickle.loads(pickle.dumps(source))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_does_not_repeat_the_originals_noise(copied):
    """The same noise on two gradients: their difference would be noiseless. Refusing is as good."""
    source = NoiseSource()
    one_draw(source)
    try:
        twin = copied(source)
    except TypeError:
        return
    assert one_draw(twin) != one_draw(source)
