"""Grouping by norm: the least spread there is, and what it saves."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tacit import PerLayerNoise
from tacit.noise import SharedNoise, joint_noise_multiplier
from tacit.queries import group_by_norm


def blocks_of(count: int) -> tuple[tuple[str, ...], ...]:
    return tuple((f"layer{i}.weight", f"layer{i}.bias") for i in range(count))


def spread(values) -> float:
    return sum((v - sum(values) / len(values)) ** 2 for v in values)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("groups", [1, 2, 3, 7])
def test_no_partition_has_less_spread(seed, groups):
    norms = np.random.default_rng(seed).lognormal(size=7).tolist()
    found = group_by_norm(blocks_of(7), norms, groups)
    assert len(found) == groups
    log_of = {f"layer{i}.weight": math.log(e) for i, e in enumerate(norms)}
    reached = sum(spread([log_of[n] for n in g if n.endswith("weight")]) for g in found)
    logs = sorted(log_of.values())
    cuts = itertools.combinations(range(1, 7), groups - 1)
    best = min(
        sum(spread(logs[a:b]) for a, b in itertools.pairwise((0, *inside, 7))) for inside in cuts
    )
    assert reached == pytest.approx(best, abs=1e-12)


def test_every_name_is_in_one_group_and_layers_stay_whole():
    found = group_by_norm(blocks_of(5), [1.0, 0.01, 1.1, 0.011, 0.0], 3)
    assert sorted(n for g in found for n in g) == sorted(n for b in blocks_of(5) for n in b)
    assert ("layer0.weight", "layer0.bias", "layer2.weight", "layer2.bias") in found
    assert ("layer1.weight", "layer1.bias", "layer3.weight", "layer3.bias") in found


@pytest.mark.parametrize(("norms", "groups"), [([1.0], 1), ([1, 2, 3], 0), ([1, 2, 3], 4)])
def test_wrong_numbers_are_refused(norms, groups):
    with pytest.raises(ValueError, match="blocks"):
        group_by_norm(blocks_of(3), norms, groups)


def test_norms_must_be_numbers():
    with pytest.raises(ValueError, match="finite"):
        group_by_norm(blocks_of(2), [1.0, math.nan], 1)


# Noise in given shares.


def test_equal_shares_are_per_layer_noise():
    deltas = [0.3, 0.02, 1.0]
    shared = SharedNoise((1, 1, 1))(deltas, [5, 5, 5], 0.7)
    assert shared == pytest.approx(PerLayerNoise()(deltas, [5, 5, 5], 0.7))


@pytest.mark.parametrize("shares", [(1.0, 2.0, 3.0), (0.1, 0.1, 5.0)])
def test_any_shares_have_the_joint_multiplier(shares):
    deltas = [0.3, 0.02, 1.0]
    stds = SharedNoise(shares)(deltas, [5, 5, 5], 0.7)
    assert joint_noise_multiplier(deltas, stds) == pytest.approx(0.7)
    sigma = 0.7 * math.sqrt(sum(p * p for p in shares))
    assert stds == pytest.approx([d * sigma / p for d, p in zip(deltas, shares, strict=True)])


def test_a_block_that_nobody_moves_takes_no_share():
    stds = SharedNoise((1.0, 2.0))([0.5, 0.0], [5, 5], 2.0)
    assert joint_noise_multiplier([0.5, 0.0], stds) == pytest.approx(2.0)


@pytest.mark.parametrize("shares", [(), (1.0, 0.0), (1.0, math.inf), (1.0, -1.0)])
def test_shares_are_positive(shares):
    with pytest.raises(ValueError, match="shares"):
        SharedNoise(shares)


def test_shares_are_as_many_as_blocks():
    with pytest.raises(ValueError, match="2 shares for 3 blocks"):
        SharedNoise((1.0, 2.0))([1, 1, 1], [5, 5, 5], 1.0)
