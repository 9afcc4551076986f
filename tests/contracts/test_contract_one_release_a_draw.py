"""Steps are accounted as independent draws, so one draw is released once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract_cases import ALL_SAMPLERS

import tacit
from tacit import Budget, Ledger, Mechanism, PerSampleClip, Records
from tacit.errors import PlanChanged

DATA = Records(torch.randn(30, 4), torch.randint(0, 3, (30,)), public_size=30)


@pytest.mark.parametrize("case", ALL_SAMPLERS, ids=lambda case: case.name)
def test_a_second_gradient_of_one_batch_is_refused_and_charges_nothing(case):
    model, relation = torch.nn.Linear(4, 3), case.relations[0]
    sampler = case.make(DATA, steps=4, seed=0)
    mechanism = Mechanism(PerSampleClip(1.0), sampler, 50.0, relation=relation)
    ledger = Ledger(None, Budget(50.0, 1e-5, relation), lease_steps=1)
    loss = tacit.losses.CrossEntropy()
    batch = sampler.next_batch()
    first, second = (mechanism.privatise(model, loss, batch) for _ in range(2))
    ledger.release(first, into=model)
    charged, before = ledger.run_status()[0], model.weight.grad.clone()
    for again in (second, mechanism.privatise(model, loss, dataclasses.replace(batch))):
        with pytest.raises(PlanChanged, match="next batch"):
            ledger.release(again, into=model)
    assert ledger.run_status()[0] == charged
    assert model.weight.grad.equal(before)
    ledger.release(mechanism.privatise(model, loss, sampler.next_batch()), into=model)


def test_an_epoch_key_saves_nothing_where_steps_are_not_epochs():
    """A batch that claims to belong to an epoch already paid for is charged like any other."""
    model, sampler = torch.nn.Linear(4, 3), tacit.PoissonSampler(DATA, 0.5, steps=9)
    mechanism = Mechanism(PerSampleClip(1.0), sampler, 50.0)
    ledger = Ledger(None, Budget(50.0, 1e-5))
    for _ in range(3):
        batch = dataclasses.replace(sampler.next_batch(), epoch="the same")
        private = mechanism.privatise(model, tacit.losses.CrossEntropy(), batch)
        ledger.release(private, into=model)
    assert ledger.run_status()[0] == 3
