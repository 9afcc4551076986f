"""Mini-sets: whole sets are in or out, each with its probability; the partition goes by id."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from participation import SIGMAS, deviations, participation, rate_is_off, size_variance_is_off

from tacit import MiniSetSampler, Records
from tacit.errors import UndeclaredConstant

NUM, SET_SIZE, STEPS = 60, 3, 6000
NUM_SETS = NUM // SET_SIZE


def records(num=NUM) -> Records:
    return Records(torch.zeros(num, 1), torch.zeros(num), public_size=num)


def sets_of(sampler: MiniSetSampler) -> list[np.ndarray]:
    """The record ids of each set."""
    ids = sampler.records.record_ids.numpy()
    return [ids[sampler.set_of_row == s] for s in range(sampler.scheme.num_sets)]


def set_participation(sampler, steps=STEPS) -> np.ndarray:
    """took_part[t, s] of sets; whoever is in a set must come with all of it."""
    took_part_TN = participation(sampler, steps)
    columns = []
    for members in sets_of(sampler):
        together = took_part_TN[:, members]
        assert (together.all(axis=1) == together.any(axis=1)).all(), "a set was torn apart"
        columns.append(together[:, 0])
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_sets_by_rate_are_independent(rate):
    took_part = set_participation(MiniSetSampler(records(), SET_SIZE, rate=rate, seed=1))
    assert not rate_is_off(took_part, rate)
    assert not size_variance_is_off(took_part, rate)
    assert rate_is_off(took_part, 1.06 * rate)


@pytest.mark.parametrize("chosen", [1, 7, NUM_SETS])
def test_so_many_sets_are_chosen(chosen):
    took_part = set_participation(MiniSetSampler(records(), SET_SIZE, chosen=chosen, seed=1))
    assert set(took_part.sum(axis=1)) == {chosen}
    rate = chosen / NUM_SETS
    std = np.sqrt(rate * (1 - rate) / STEPS)
    assert max(deviations(mean, rate, std) for mean in took_part.mean(axis=0)) < SIGMAS


def test_records_of_a_set_are_fully_correlated_and_records_of_two_sets_are_not():
    sampler = MiniSetSampler(records(), SET_SIZE, rate=0.3, seed=1)
    took_part = participation(sampler, STEPS)
    first, second = sets_of(sampler)[:2]
    assert np.corrcoef(took_part[:, first].T).min() > 1 - 1e-9
    across = np.corrcoef(took_part[:, first[0]], took_part[:, second[0]])[0, 1]
    assert abs(across) < SIGMAS / np.sqrt(STEPS)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 5), st.data())
def test_removing_or_replacing_leaves_everyone_in_their_set(num, set_size, partition, data):
    everyone = records(num)
    index = data.draw(st.integers(0, num - 1))
    neighbours = [everyone.without(index), everyone.replaced(index, torch.ones(1), 1.0)]

    def places(some: Records) -> dict[int, int]:
        sampler = MiniSetSampler(some, set_size, chosen=1, partition_seed=partition)
        return dict(zip(some.record_ids.tolist(), sampler.set_of_row.tolist(), strict=True))

    before = places(everyone)
    for neighbour in neighbours:
        after = places(neighbour)
        assert all(before[who] == place for who, place in after.items())


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 9))
def test_no_set_is_larger_than_declared(num, set_size):
    sampler = MiniSetSampler(records(num), set_size, chosen=1)
    sizes = [len(members) for members in sets_of(sampler)]
    assert max(sizes) <= set_size
    assert sum(sizes) == num


def test_the_partition_does_not_follow_the_order_of_records():
    """Neighbours in a file are often alike: consecutive ids must not share sets by design."""
    sampler = MiniSetSampler(records(), SET_SIZE, chosen=1)
    same_set = (sampler.set_of_row[1:] == sampler.set_of_row[:-1]).mean()
    assert same_set < 0.25


def test_an_id_beyond_the_declared_ones_is_refused():
    everyone = records(4)
    with pytest.raises(UndeclaredConstant, match="ids"):
        MiniSetSampler(Records(everyone.inputs, everyone.targets, public_size=3), 2, chosen=1)


def test_groups_name_the_set_of_each_row():
    sampler = MiniSetSampler(records(), SET_SIZE, chosen=4, seed=0)
    for _ in range(20):
        batch = sampler.next_batch()
        assert batch.groups.tolist() == sampler.set_of_row[batch.indices.numpy()].tolist()
