"""How many records are gathered at once, and whether they are padded, changes nothing."""

from __future__ import annotations

import pytest
import torch
from contract_checks import everyone, flat_sums

NUM_RECORDS = 10


def assert_same(one, other):
    for a, b in zip(flat_sums(one), flat_sums(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("max_physical", [1, 3, 7])
def test_pieces(pair, max_physical):
    records = pair.records(NUM_RECORDS)
    whole = pair.query(pair.model, pair.loss, everyone(records))
    pieces = pair.query(pair.model, pair.loss, everyone(records, max_physical))
    assert_same(whole, pieces)


@pytest.mark.parametrize("max_physical", [1, 3, 7, None])
def test_padded_draws(any_pair, sampler_case, max_physical):
    """The same seed draws the same people, padded or not, in pieces or not."""
    records = any_pair.records(NUM_RECORDS)
    how = {"max_physical_batch": max_physical, "steps": 4, "seed": 5}
    plain = sampler_case.make(records, steps=4, seed=5)
    padded = sampler_case.make(records, padded=True, **how)
    for batch, filled in zip(plain, padded, strict=True):
        whole = any_pair.query(any_pair.model, any_pair.loss, batch)
        assert_same(whole, any_pair.query(any_pair.model, any_pair.loss, filled))


@pytest.mark.parametrize("max_physical", [3, None])
def test_draws_padded_to_a_multiple(any_pair, sampler_case, max_physical):
    records = any_pair.records(NUM_RECORDS)
    plain = sampler_case.make(records, steps=4, seed=5)
    padded = sampler_case.make(records, steps=4, seed=5, pad_to=4, max_physical_batch=max_physical)
    for batch, filled in zip(plain, padded, strict=True):
        assert len(filled) % 4 == 0
        whole = any_pair.query(any_pair.model, any_pair.loss, batch)
        assert_same(whole, any_pair.query(any_pair.model, any_pair.loss, filled))


def test_padded_pieces_have_one_shape_and_drop_nobody(any_pair, sampler_case):
    records = any_pair.records(NUM_RECORDS)
    plain = sampler_case.make(records, steps=6, seed=5)
    padded = sampler_case.make(records, steps=6, seed=5, padded=True, max_physical_batch=3)
    for batch, filled in zip(plain, padded, strict=True):
        pieces = list(filled.physical())
        assert {len(piece) for piece in pieces} == {3}
        kept = torch.cat([piece.record_ids[piece.mask] for piece in pieces])
        assert kept.tolist() == batch.record_ids.tolist()


def test_the_comparison_sees_one_record_left_out(any_pair):
    records = any_pair.records(NUM_RECORDS)
    whole = any_pair.query(any_pair.model, any_pair.loss, everyone(records))
    fewer = any_pair.query(any_pair.model, any_pair.loss, everyone(records.without(3)))
    with pytest.raises(AssertionError):
        assert_same(whole, fewer)
