"""How many records are gathered at once, and whether they are padded, changes nothing."""

from __future__ import annotations

import pytest
import torch
from contract_cases import ALL_QUERIES, ALL_SAMPLERS, first_pair
from contract_checks import everyone, flat_sums
from pairwise import pairwise

NUM_RECORDS = 10
QUERIES = {query.name: query for query in ALL_QUERIES}
SAMPLERS = {sampler.name: sampler for sampler in ALL_SAMPLERS}
# How a draw is padded, and in what pieces it is gathered.
PADDED = {
    "padded": {"padded": True},
    "padded-by-1": {"padded": True, "max_physical_batch": 1},
    "padded-by-3": {"padded": True, "max_physical_batch": 3},
    "padded-by-7": {"padded": True, "max_physical_batch": 7},
    "to-4": {"pad_to": 4},
    "to-4-by-3": {"pad_to": 4, "max_physical_batch": 3},
}
DRAWS = pairwise({"query": tuple(QUERIES), "sampler": tuple(SAMPLERS), "how": tuple(PADDED)}, [])


def assert_same(one, other):
    for a, b in zip(flat_sums(one), flat_sums(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_pieces(pair):
    records = pair.records(NUM_RECORDS)
    whole = pair.query(pair.model, pair.loss, everyone(records))
    for max_physical in (1, 3, 7):
        pieces = pair.query(pair.model, pair.loss, everyone(records, max_physical))
        assert_same(whole, pieces)


@pytest.mark.parametrize("row", DRAWS, ids=lambda row: "/".join(row.values()))
def test_padded_draws(row):
    """The same seed draws the same people, padded or not, in pieces or not."""
    pair, sampler_case = first_pair(QUERIES[row["query"]]), SAMPLERS[row["sampler"]]
    records, how = pair.records(NUM_RECORDS), PADDED[row["how"]]
    plain = sampler_case.make(records, steps=4, seed=5)
    padded = sampler_case.make(records, steps=4, seed=5, **how)
    for batch, filled in zip(plain, padded, strict=True):
        assert len(filled) % how.get("pad_to", 1) == 0
        whole = pair.query(pair.model, pair.loss, batch)
        assert_same(whole, pair.query(pair.model, pair.loss, filled))


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
