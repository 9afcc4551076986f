"""Which sets are private records: by memory, by ids within one origin, and by contents."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tacit
from tacit.errors import NotPublic
from tacit.queries.record_overlap import require_held_out, require_public, share_among


def made(count=200, seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return tacit.Records(inputs, (inputs[:, 0] > 0).long(), **more)


PRIVATE = made()


def refused(public, private=PRIVATE):
    with pytest.raises(NotPublic):
        require_public(public, private)


def test_sets_that_were_made_apart_are_told_apart():
    """Both are called "records" and have rows 0, 1, 2, …"""
    public = made(seed=1)
    assert public.name == PRIVATE.name
    assert torch.equal(public.record_ids, PRIVATE.record_ids)
    require_public(public, PRIVATE)
    require_held_out(public, PRIVATE)


def test_row_numbers_name_records_of_one_origin():
    for same in (
        PRIVATE,
        PRIVATE.take(slice(5)),
        copy.deepcopy(PRIVATE).take(torch.arange(7)),
        pickle.loads(pickle.dumps(PRIVATE)),
        PRIVATE.replaced(3, torch.zeros(4), 0),
        tacit.Records(PRIVATE.inputs * 2 + 1, PRIVATE.targets, origin=PRIVATE.origin),
    ):
        refused(same)
    require_public(PRIVATE.take(slice(50)), PRIVATE.take(slice(50, None)))


def test_ids_that_were_given_name_records_under_one_name():
    ids = torch.arange(200)
    private, public = made(record_ids=ids), made(seed=1, record_ids=ids)
    refused(public, private)
    require_public(made(seed=1, record_ids=ids, name="elsewhere"), private)
    require_public(made(seed=1, record_ids=ids + 1000), private)


@pytest.mark.parametrize(
    "change",
    [
        torch.clone,
        torch.Tensor.double,
        lambda x: x.double().numpy(),
        lambda x: x[torch.randperm(len(x))],
        lambda x: x[60:].clone(),
        lambda x: torch.cat([x[:60], torch.randn(30, 4)]),
    ],
)
def test_copies_are_refused_in_any_type_and_order(change):
    inputs = change(PRIVATE.inputs)
    refused(tacit.Records(inputs, torch.zeros(len(inputs))))


def test_equal_rows_of_two_sets_pass_while_they_are_few():
    some = torch.cat([made(seed=1).inputs, PRIVATE.inputs[:40]])
    public = tacit.Records(some, torch.zeros(len(some)))
    require_public(public, PRIVATE)
    assert 0 < share_among(public, PRIVATE) < 0.5


def test_nan_zero_and_minus_zero_are_equal_to_themselves():
    inputs = PRIVATE.inputs.clone()
    inputs[:, 1], inputs[:, 2] = torch.nan, 0.0
    inputs[::3, 3] = torch.inf
    private = tacit.Records(inputs, PRIVATE.targets)
    changed = inputs.clone()
    changed[:, 2] = -0.0
    assert share_among(tacit.Records(changed), private) == 1.0
    assert share_among(tacit.Records(-changed.nan_to_num(5.0)), private) == 0.0


def test_one_input_may_be_of_two_classes():
    other = tacit.Records(PRIVATE.inputs.clone(), 1 - PRIVATE.targets)
    require_held_out(other, PRIVATE)
    with pytest.raises(NotPublic):
        require_held_out(tacit.Records(PRIVATE.inputs.clone(), PRIVATE.targets), PRIVATE)


def test_trees_and_whole_numbers_are_compared():
    ids = torch.randint(0, 30_000, (100, 12), generator=torch.Generator().manual_seed(0))
    private = tacit.Records({"ids": ids, "mask": ids > 9}, ids)
    same = tacit.Records({"ids": ids.int(), "mask": (ids > 9).long()}, ids)
    assert share_among(same, private) == 1.0
    other = tacit.Records({"ids": ids + 1, "mask": ids > 9}, ids)
    assert share_among(other, private) == 0.0
