"""Two attempts that draw the same seeded batches are not two samples: refused on one ledger."""

from __future__ import annotations

import pytest
import torch
from forked import Forked
from tiny_run import ADD, REPLACE, charged, gradient, log_rows, one_weight

from tacit import Budget, Ledger, Mechanism, PerSampleClip, PoissonSampler, losses
from tacit.accounting import Plan
from tacit.errors import PlanChanged
from tacit.sampling import Poisson, ShuffledEpochs, WithoutReplacement

BUDGET = Budget(3.0, 1e-13)
PLAN = Plan(Poisson(0.1), 20.0, ADD, 20)


def step(ledger, sampling, plan=PLAN):
    model = one_weight()
    private = gradient(plan, model)
    private.sampling = sampling
    ledger.release(private, into=model)
    return model


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ledger"
    with Ledger(path, BUDGET) as ledger:
        ledger.begin(PLAN, name="first")
        for _ in range(3):
            step(ledger, "seed 1")
    return path


@pytest.mark.parametrize("name", ["first", "second"])
def test_the_same_batches_again_are_refused_before_anything_is_charged(name, path):
    held = charged(path)
    with Ledger(path) as ledger:
        ledger.begin(PLAN, name=name)
        with pytest.raises(PlanChanged, match="another seed, or none") as error:
            step(ledger, "seed 1")
        assert "'first'" in str(error.value)
        assert charged(path) == held
        for other in ("seed 2", None):  # the remedies
            step(ledger, other)
        assert charged(path) == held + 2


def test_the_fingerprint_is_written_once_and_with_the_charge(path):
    (row,) = log_rows(path, "sampling")
    assert row == {"kind": "sampling", "run": 1, "attempt": 1, "fingerprint": "seed 1"}
    kinds = [r["kind"] for r in log_rows(path, "sampling", "charge")]
    assert kinds[:2] == ["sampling", "charge"]


def test_batches_that_change_within_a_lease_are_written_too(tmp_path):
    plan = Plan(Poisson(0.1), 500.0, ADD, 2000)  # a lease is 20 steps
    with Ledger(tmp_path / "ledger", BUDGET) as ledger:
        ledger.begin(plan)
        for sampling in ("a", "a", "b", "a", None):
            step(ledger, sampling, plan)
        assert ledger.run_status()[0] == 5
    assert [r["fingerprint"] for r in log_rows(tmp_path / "ledger", "sampling")] == ["a", "b"]
    with Ledger(tmp_path / "ledger") as ledger, pytest.raises(PlanChanged):
        step(ledger, "b", plan)


def test_a_child_does_not_go_on_with_its_parent_s_batches(path):
    with Ledger(path) as ledger:
        ledger.begin(PLAN, name="second")
        step(ledger, "seed 2")
        how, why = Forked(lambda: step(ledger, "seed 2").weight.grad is not None).result()
        assert (how, "seed" in why) == ("raised", True)
        step(ledger, "seed 2")


@pytest.mark.parametrize(
    ("scheme", "relation"),
    [(Poisson(1.0), ADD), (WithoutReplacement(9, 9), REPLACE), (ShuffledEpochs(4), REPLACE)],
)
def test_without_amplification_batches_may_come_again(scheme, relation, tmp_path):
    """Who is in the batch is no secret that the ε counts on."""
    plan = Plan(scheme, 100.0, relation, 20)
    for name in ("first", "second"):
        with Ledger(tmp_path / "ledger", Budget(3.0, 1e-13, relation)) as ledger:
            ledger.begin(plan, name=name)
            assert torch.isfinite(step(ledger, "seed 1", plan).weight.grad).all()


def test_two_samplers_of_one_seed_in_one_attempt(tmp_path):
    """Their batches are the same, one by one: a second release of each is no new sample."""
    data = (torch.randn(40, 1), torch.randn(40, 1))

    def sampler():
        return PoissonSampler(data, 0.5, steps=8, expected_batch_size=20, seed=3)

    def released(ledger, one, count):
        mechanism = Mechanism(PerSampleClip(1.0), one, 20.0)
        model = one_weight()
        loss = losses.MeanAbsoluteError()
        for _, batch in zip(range(count), one, strict=False):
            ledger.release(mechanism.privatise(model, loss, batch), into=model)

    with Ledger(tmp_path / "ledger", Budget(3.0, 1e-5)) as ledger:
        first = sampler()
        released(ledger, first, 2)
        with pytest.raises(PlanChanged, match="another seed, or none"):
            released(ledger, sampler(), 1)
        released(ledger, first, 2)  # another pass over one sampler draws other batches
