"""One record moves each block and statistic by at most what its query declares."""

from __future__ import annotations

import functools

import torch
from contract_cases import ALL_QUERIES, Pair
from contract_checks import ROUNDING, ascend, everyone, worst_alone, worst_share

PLAIN = ALL_QUERIES[0]


def worst(pair, records, candidates, relation):
    return worst_share(pair.query, pair.model, pair.loss, records, candidates, relation)


def test_random_records(pair, relation):
    candidates = [(x, y) for y, x in enumerate(pair.draw(2))]
    assert max(worst(pair, pair.records(), candidates, relation)) <= 1 + ROUNDING


def test_one_record_alone_adds_at_most_its_bound(pair):
    candidates = [(x, y) for x in pair.draw(3) for y in (0, 1)]
    alone = worst_alone(pair.query, pair.model, pair.loss, pair.records(), candidates)
    assert max(alone) <= 1 + ROUNDING


def test_huge_records(continuous_pair, relation):
    pair = continuous_pair
    candidates = [(scale * pair.draw(1)[0], 0) for scale in (1e3, 1e6, 1e12)]
    assert max(worst(pair, pair.records(), candidates, relation)) <= 1 + ROUNDING


@functools.cache
def ascended(model_case):
    """The strongest replacements of a model's first record; they do not depend on the query."""
    pair = Pair(PLAIN, model_case)
    records = pair.records(n=4)
    x0, y0 = records.inputs[0], records.targets[0]
    start = pair.draw(1)[0]
    return [(ascend(pair.model, pair.loss, x0, y0, start, y), y) for y in torch.arange(2)]


def test_records_found_by_gradient_ascent(continuous_pair, relation):
    pair = continuous_pair
    found = ascended(pair.model_case)
    assert max(worst(pair, pair.records(n=4), found, relation)) <= 1 + ROUNDING


def test_the_bound_is_nearly_attained(pair, relation):
    """Otherwise a bound of 10^9 would pass all of the above."""
    records = pair.records()
    # With two classes, the other label turns a record's gradient around.
    flipped = [(records.inputs[0], 1 - records.targets[0])]
    other = [(x, y) for x in pair.draw(2) for y in (0, 1)]
    num_blocks = len(pair.query(pair.model, pair.loss, everyone(records)).blocks)
    found = worst(pair, records, flipped + other, relation)[:num_blocks]
    assert min(found) >= pair.query_case.attains
