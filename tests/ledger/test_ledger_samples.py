"""What is charged as one random sample is sampled once: seeded batches and shuffled epochs."""

from __future__ import annotations

import pytest
import torch
from forked import Forked
from tiny_run import ADD, REPLACE, charged, gradient, log_rows, one_weight

from tacit import (
    Budget,
    Ledger,
    Mechanism,
    PerSampleClip,
    PoissonSampler,
    Records,
    ShuffleSampler,
    losses,
)
from tacit.accounting import Plan
from tacit.errors import PlanChanged, TacitError
from tacit.queries import Block, BoundedGradient
from tacit.sampling import Poisson, ShuffledEpochs, WithoutReplacement
from tacit.sampling.scheme import Unit

# Two attempts that draw the same seeded batches are not two samples.


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


# An epoch is charged once because nobody is in it twice. Then nobody may be in it twice.


EPOCHS_BUDGET = Budget(3.0, 1e-5, REPLACE)
RECORDS = Records(torch.zeros(20, 1), torch.zeros(20))


class Attendance:
    """A query that adds nothing, and remembers who was in the released batches."""

    unit = Unit.RECORD

    def __init__(self):
        self.times = torch.zeros(20, dtype=torch.int64)

    def __call__(self, model, loss, batch):
        self.latest = batch.indices
        block = Block(("weight",), (model.weight,), (torch.zeros_like(model.weight),), 1.0)
        return BoundedGradient((block,), divisor=batch.divisor)

    def count(self):
        self.times[self.latest] += 1


def fresh(query, seed):
    sampler = ShuffleSampler(RECORDS, batch_size=5, steps=40, seed=seed)
    return sampler, Mechanism(query, sampler, 10.0, relation=REPLACE, seed=seed)


def release_next(ledger, sampler, mechanism, model):
    private = mechanism.privatise(model, None, sampler.next_batch())
    ledger.release(private, into=model)
    mechanism.query.count()


def events_charged(path, plan):
    with Ledger(path) as ledger:
        return sum(plan.scheme.num_events(run.steps) for run in ledger.statement().runs)


def test_whole_epochs(tmp_path):
    query, model = Attendance(), one_weight()
    sampler, mechanism = fresh(query, 0)
    with Ledger(tmp_path / "ledger", EPOCHS_BUDGET) as ledger:
        for _ in range(9):
            release_next(ledger, sampler, mechanism, model)
    assert query.times.max() <= events_charged(tmp_path / "ledger", mechanism.plan) == 3


def test_a_run_that_goes_on_begins_a_new_epoch(tmp_path):
    """Each life shuffles anew, so a record may come up in each, though steps add up to an epoch."""
    query, model = Attendance(), one_weight()
    for life in range(4):
        sampler, mechanism = fresh(query, life)
        with Ledger(tmp_path / "ledger", EPOCHS_BUDGET) as ledger:
            ledger.begin(mechanism.plan, name="mine")
            release_next(ledger, sampler, mechanism, model)
    assert query.times.max() >= 2
    assert query.times.max() <= events_charged(tmp_path / "ledger", mechanism.plan)


def test_batches_that_were_drawn_and_not_released(tmp_path):
    """Skipping batches moves the sampler on to the next epoch, while the ledger stays behind."""
    query, model = Attendance(), one_weight()
    sampler, mechanism = fresh(query, 0)
    try:
        with Ledger(tmp_path / "ledger", EPOCHS_BUDGET) as ledger:
            for step in range(8):
                if step in (0, 1, 4, 5):
                    sampler.next_batch()
                else:
                    release_next(ledger, sampler, mechanism, model)
    except TacitError:
        return  # refusing to go on is an answer too
    assert query.times.max() <= events_charged(tmp_path / "ledger", mechanism.plan)
