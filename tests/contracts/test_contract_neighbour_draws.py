"""One sampling seed, one record changed: everybody else is drawn as before, with the same people.

A sampler that cuts a batch into sets by position shifts everyone behind a removed record into
another set; the last test plants that and sees it flagged.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contract_checks import ROUNDING, distances, limits

from tacit import MiniSetSampler, Records, Relation

SEED, STEPS = 3, 20


def draws(sampler) -> list[dict[int, int]]:
    """For each step, {record id: its mini-set} of those who take part."""
    steps = []
    for batch in sampler:
        sets = batch.groups if batch.groups is not None else torch.zeros(len(batch)).long()
        steps.append(dict(zip(batch.record_ids.tolist(), sets.tolist(), strict=True)))
    return steps


def others_disturbed(make, records: Records, neighbour: Records, changed_id: int) -> int:
    """How often somebody else took part, or was in a set, differently because of the change."""
    disturbed = 0
    before = draws(make(records, steps=STEPS, seed=SEED))
    after = draws(make(neighbour, steps=STEPS, seed=SEED))
    for one, other in zip(before, after, strict=True):
        one.pop(changed_id, None)
        other.pop(changed_id, None)
        disturbed += one != other
    return disturbed


def some_records(n=14) -> Records:
    torch.manual_seed(0)
    return Records(torch.randn(n, 4, dtype=torch.float64), torch.arange(n) % 2, public_size=n)


@pytest.mark.parametrize("index", [0, 6, 13])
def test_replacing_a_record_disturbs_nobody(sampler_case, index):
    records = some_records()
    neighbour = records.replaced(index, torch.full((4,), 9.0), 1)
    assert others_disturbed(sampler_case.make, records, neighbour, index) == 0


@pytest.mark.parametrize("index", range(14))
def test_removing_a_record_disturbs_nobody_where_sets_go_by_id(sampler_by_id, index):
    records = some_records()
    assert others_disturbed(sampler_by_id.make, records, records.without(index), index) == 0


def assert_every_step_is_bounded(pair, make, records, neighbour, index, relation):
    """Two neighbouring datasets through the whole pipe under one seed, step by step.

    Until the changed record has taken part three times, or for all steps.
    """
    here = make(records, steps=STEPS, seed=SEED)
    there = make(neighbour, steps=STEPS, seed=SEED)
    touched = 0
    for one, other in zip(here, there, strict=True):
        a = pair.query(pair.model, pair.loss, one)
        b = pair.query(pair.model, pair.loss, other)
        moved = distances(a, b)
        touched += max(moved) > 0
        allowed = limits(a, relation)
        assert all(m <= d * (1 + ROUNDING) for m, d in zip(moved, allowed, strict=True))
        if index not in one.record_ids:
            assert max(moved) == 0
        if touched == 3:
            break
    assert touched > 0


def test_every_step_moves_by_its_sensitivity_when_one_is_replaced(any_pair, sampler_case):
    records = any_pair.records(14)
    neighbour = records.replaced(4, 1e6 * records.inputs[4], 1 - records.targets[4])
    assert_every_step_is_bounded(
        any_pair, sampler_case.make, records, neighbour, 4, Relation.REPLACE_ONE
    )


def test_every_step_moves_by_its_sensitivity_when_one_is_removed(any_pair, sampler_by_id):
    records = any_pair.records(14)
    assert_every_step_is_bounded(
        any_pair, sampler_by_id.make, records, records.without(4), 4, Relation.ADD_OR_REMOVE_ONE
    )


class SetsByPosition(MiniSetSampler):
    """The bug: set k is rows 3k, 3k+1, 3k+2 of whatever dataset it is given."""

    def draw(self, stream):
        chosen = stream.subset(self.scheme.num_sets, 2)
        rows = np.flatnonzero(np.isin(np.arange(len(self.records)) // 3, chosen))
        return rows, rows // 3


def by_position(data, **kw):
    return SetsByPosition(data, 3, chosen=2, **kw)


def by_id(data, **kw):
    return MiniSetSampler(data, 3, chosen=2, **kw)


@pytest.mark.parametrize(("make", "caught"), [(by_position, True), (by_id, False)])
def test_sets_by_position_are_caught(make, caught):
    records = some_records()
    assert (others_disturbed(make, records, records.without(0), 0) > 0) == caught
