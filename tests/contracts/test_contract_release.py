"""The ledger releases a gradient once, into the model it is for, and nothing beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tacit
from tacit import Budget, Ledger, Mechanism
from tacit.errors import BudgetExceeded, PlanChanged


@pytest.fixture
def ledger():
    with Ledger(budget=Budget(100.0, 1e-5)) as ledger:
        yield ledger


def private_gradient(pair, noise_multiplier=1.0):
    sampler = tacit.PoissonSampler(pair.records(), 1.0, steps=4)
    mechanism = Mechanism(pair.query, sampler, noise_multiplier)
    return mechanism.privatise(pair.model, pair.loss, sampler.next_batch())


def test_twice_is_refused(any_pair, ledger):
    private = private_gradient(any_pair)
    ledger.release(private, into=any_pair.model)
    before = [p.grad.clone() for p in any_pair.model.parameters()]
    with pytest.raises(RuntimeError, match="released already"):
        ledger.release(private, into=any_pair.model)
    after = [p.grad for p in any_pair.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_another_model_is_refused_and_gets_nothing(any_pair, ledger):
    twin = any_pair.model_case.model()
    with pytest.raises(ValueError, match="another model"):
        ledger.release(private_gradient(any_pair), into=twin)
    assert all(p.grad is None for p in twin.parameters())
    assert all(p.grad is None for p in any_pair.model.parameters())


def test_a_gradient_that_nobody_paid_for_is_cleared(any_pair, ledger):
    """A frozen layer, and a head beside the model, both with gradients from elsewhere."""
    whole = nn.ModuleDict({"model": any_pair.model, "beside": nn.Linear(2, 2)})
    first = next(any_pair.model.parameters())
    first.requires_grad_(False)
    query = any_pair.query_case.make(any_pair.model)
    for parameter in whole.parameters():
        parameter.grad = torch.ones_like(parameter)
    sampler = tacit.PoissonSampler(any_pair.records(), 1.0, steps=4)
    mechanism = Mechanism(query, sampler, noise_multiplier=1.0)
    private = mechanism.privatise(any_pair.model, any_pair.loss, sampler.next_batch())
    ledger.release(private, into=whole)
    assert first.grad is None
    assert all(p.grad is None for p in whole["beside"].parameters())
    trained = [p for p in any_pair.model.parameters() if p.requires_grad]
    assert all((p.grad != 1).all() for p in trained)


def test_a_refusal_leaves_gradients_as_they_were(any_pair):
    for parameter in any_pair.model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    with Ledger(budget=Budget(1e-3, 1e-9)) as ledger, pytest.raises(BudgetExceeded):
        ledger.release(private_gradient(any_pair), into=any_pair.model)
    assert all((p.grad == 3.0).all() for p in any_pair.model.parameters())


def test_no_noise_is_never_released(any_pair, ledger):
    with pytest.raises(BudgetExceeded):
        ledger.release(private_gradient(any_pair, noise_multiplier=0.0), into=any_pair.model)


def test_another_plan_in_the_same_run_is_refused(any_pair, ledger):
    ledger.release(private_gradient(any_pair), into=any_pair.model)
    with pytest.raises(PlanChanged):
        ledger.release(private_gradient(any_pair, noise_multiplier=2.0), into=any_pair.model)


def test_a_batch_from_another_scheme_is_refused(any_pair, sampler_case):
    """The accounting is for one sampler; batches drawn by another would void it."""
    records = any_pair.records(12)
    planned = tacit.PoissonSampler(records, 0.01)
    mechanism = Mechanism(any_pair.query, planned, noise_multiplier=1.0)
    with pytest.raises(PlanChanged, match="sampler that draws the batches"):
        mechanism.privatise(any_pair.model, any_pair.loss, sampler_case.make(records).next_batch())
