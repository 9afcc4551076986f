"""The divisor is a public constant: it does not follow the number drawn, nor who is there."""

from __future__ import annotations

import torch

from tacit import Records

NUM_RECORDS, STEPS, SEED = 13, 6, 0


def some_records() -> Records:
    return Records(torch.randn(12, 4), torch.zeros(12).long(), public_size=12)


def test_it_is_the_declared_constant_whoever_is_drawn(any_pair, sampler_case):
    records = any_pair.records(NUM_RECORDS)
    sampler = sampler_case.make(records, steps=STEPS, seed=SEED)
    found = {any_pair.query(any_pair.model, any_pair.loss, batch).divisor for batch in sampler}
    assert found == {sampler.expected_batch_size}


def test_batches_have_different_sizes(sampler_case):
    """The test above says something only where sizes vary: everywhere but at a fixed size."""
    records = Records(torch.randn(NUM_RECORDS, 4), torch.zeros(NUM_RECORDS).long(), public_size=13)
    sizes = {len(batch) for batch in sampler_case.make(records, steps=STEPS, seed=SEED)}
    assert (len(sizes) > 1) == (sampler_case.name != "fixed-size")


def test_it_stays_when_a_record_is_removed(sampler_case):
    records = some_records()
    before = sampler_case.make(records).next_batch().divisor
    assert sampler_case.make(records.without(3)).next_batch().divisor == before


def test_it_is_what_the_declared_size_implies(sampler_case):
    """Half of the data missing, the same declaration: the same divisor."""
    inputs, targets = torch.zeros(12, 4), torch.zeros(12).long()
    whole = Records(inputs, targets, public_size=12)
    half = Records(inputs[:6], targets[:6], public_size=12)
    assert (
        sampler_case.make(whole).expected_batch_size == sampler_case.make(half).expected_batch_size
    )
