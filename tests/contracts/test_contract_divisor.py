"""The divisor is a public constant: it does not follow the number drawn, nor who is there."""

from __future__ import annotations

import torch

from tacit import Records


def divisors(pair, sampler):
    return [(len(b), pair.query(pair.model, pair.loss, b).divisor) for b in sampler]


def test_it_is_the_declared_constant_whoever_is_drawn(any_pair, sampler_case):
    sampler = sampler_case.make(any_pair.records(12), steps=8, seed=0)
    assert {divisor for _, divisor in divisors(any_pair, sampler)} == {sampler.expected_batch_size}


def test_batches_of_different_sizes_share_it(any_pair, sampler_case):
    """The test above says something only where sizes vary: everywhere but at a fixed size."""
    sampler = sampler_case.make(any_pair.records(13), steps=20, seed=0)
    sizes = {size for size, _ in divisors(any_pair, sampler)}
    assert (len(sizes) > 1) == (sampler_case.name != "fixed-size")


def test_it_stays_when_a_record_is_removed(any_pair, sampler_case):
    records = any_pair.records(12)
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
