"""A record that is not finite contributes exactly nothing, and leaves the others alone."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from contract_checks import everyone, flat_sums, gradient_of_one

import tacit
from tacit import Budget, Ledger, Mechanism
from tacit.losses import WithConstant

BAD = 2  # the row of the record that is not finite


def assert_counts_for_nothing(pair, records, loss=None):
    """The sums are, bit for bit, those of the same batch with the record masked out."""
    loss = loss or pair.loss
    batch = everyone(records)
    with_it = pair.query(pair.model, loss, batch)
    mask = torch.arange(len(records)) != BAD
    without_it = pair.query(pair.model, loss, dataclasses.replace(batch, mask=mask))
    for a, b in zip(flat_sums(with_it), flat_sums(without_it), strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("everywhere", [True, False], ids=["every-entry", "one-entry"])
def test_an_input_that_is_not_finite(continuous_pair, value, everywhere):
    records = continuous_pair.records()
    x = records.inputs[BAD].clone()
    x.view(-1)[slice(None) if everywhere else slice(1)] = value
    own = gradient_of_one(continuous_pair.model, continuous_pair.loss, x, torch.tensor(0))
    if torch.isfinite(own).all():
        pytest.skip("a saturated unit in a frozen layer: the gradient is finite, and bounded")
    assert_counts_for_nothing(continuous_pair, records.replaced(BAD, x, 0))


def test_a_loss_that_is_not_a_number_for_one_target(pair):
    def loss(outputs, targets):
        weight = torch.where(targets == 7, math.nan, 1.0)
        return (weight * outputs.logsumexp(dim=1)).mean()

    records = pair.records()
    given = WithConstant(loss, 10.0)  # for a query that asks
    assert_counts_for_nothing(pair, records.replaced(BAD, records.inputs[BAD], 7), given)


def test_a_gradient_that_overflows(pair):
    def loss(outputs, targets):
        huge = torch.full_like(outputs[:, 0], 1e308)
        weight = torch.where(targets == 7, huge, 1.0)
        return (weight * 1e3 * outputs.sum(dim=1)).mean()

    records = pair.records()
    given = WithConstant(loss, 1e4)
    assert_counts_for_nothing(pair, records.replaced(BAD, records.inputs[BAD], 7), given)


def test_what_is_released_is_finite(any_pair):
    records = any_pair.records()
    records = records.replaced(BAD, torch.full_like(records.inputs[BAD], math.nan), 0)
    sampler = tacit.PoissonSampler(records, 1.0, steps=1)
    mechanism = Mechanism(any_pair.query, sampler, noise_multiplier=1.0)
    with Ledger(budget=Budget(100.0, 1e-5)) as ledger:
        private = mechanism.privatise(any_pair.model, any_pair.loss, sampler.next_batch())
        ledger.release(private, into=any_pair.model)
    grads = [p.grad for p in any_pair.model.parameters() if p.requires_grad]
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_the_check_sees_a_record_that_counts(any_pair):
    with pytest.raises(AssertionError):
        assert_counts_for_nothing(any_pair, any_pair.records())
