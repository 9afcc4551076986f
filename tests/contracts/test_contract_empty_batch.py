"""A step that nobody takes part in is a step: its sum is zero, its noise is real, it is charged."""

from __future__ import annotations

import pytest
import torch
from contract_checks import everyone, flat_sums, limits

import tacit
from tacit import Budget, Ledger, Mechanism, Records


def nobody(pair) -> Records:
    return Records(pair.draw(2)[:0], torch.zeros(0).long(), public_size=6)


def test_the_sum_over_nobody_is_zero_with_the_usual_sensitivity(pair, relation):
    some = pair.query(pair.model, pair.loss, everyone(pair.records()))
    none = pair.query(pair.model, pair.loss, everyone(nobody(pair)))
    assert all(not sums.any() for sums in flat_sums(none))
    assert limits(none, relation) == limits(some, relation)
    assert none.divisor == some.divisor
    assert [b.names for b in none.blocks] == [b.names for b in some.blocks]


@pytest.mark.parametrize("padded", [False, True])
def test_noise_is_added_and_the_ledger_advances(any_pair, padded):
    for records in (any_pair.records(), nobody(any_pair)):
        sampler = tacit.PoissonSampler(records, 1e-9, steps=3, padded=padded)
        with Ledger(budget=Budget(100.0, 1e-5)) as ledger:
            mechanism = Mechanism(any_pair.query, sampler, noise_multiplier=1.0)
            for step, batch in enumerate(sampler, start=1):
                private = mechanism.privatise(any_pair.model, any_pair.loss, batch)
                ledger.release(private, into=any_pair.model)
                assert ledger.run_status()[0] == step
                frozen = getattr(any_pair.query, "frozen", None)
                masks = frozen.active(any_pair.model) if frozen is not None else {}
                for name, p in any_pair.model.named_parameters():
                    if p.requires_grad:
                        assert torch.isfinite(p.grad).all()
                        assert torch.equal(p.grad != 0, masks.get(name, torch.ones_like(p) > 0))


@pytest.mark.parametrize("padded", [False, True])
def test_every_sampler_that_takes_an_empty_dataset_draws_empty_batches(
    any_pair, sampler_case, padded
):
    if not sampler_case.may_be_empty:
        with pytest.raises(ValueError, match="record"):
            sampler_case.make(nobody(any_pair))
        return
    sampler = sampler_case.make(nobody(any_pair), steps=3, padded=padded)
    for batch in sampler:
        assert batch.mask is None or not batch.mask.any()
        assert len(batch) == 0 or padded
        bounded = any_pair.query(any_pair.model, any_pair.loss, batch)
        assert all(not sums.any() for sums in flat_sums(bounded))
