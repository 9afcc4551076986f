"""An epoch is charged once because nobody is in it twice. Then nobody may be in it twice."""

import torch
from tiny_run import REPLACE, one_weight

from tacit import Budget, Ledger, Mechanism, Records, ShuffleSampler
from tacit.errors import TacitError
from tacit.queries import Block, BoundedGradient
from tacit.sampling.scheme import Unit

BUDGET = Budget(3.0, 1e-5, REPLACE)
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
    with Ledger(tmp_path / "ledger", BUDGET) as ledger:
        for _ in range(9):
            release_next(ledger, sampler, mechanism, model)
    assert query.times.max() <= events_charged(tmp_path / "ledger", mechanism.plan) == 3


def test_a_run_that_goes_on_begins_a_new_epoch(tmp_path):
    """Each life shuffles anew, so a record may come up in each, though steps add up to an epoch."""
    query, model = Attendance(), one_weight()
    for life in range(4):
        sampler, mechanism = fresh(query, life)
        with Ledger(tmp_path / "ledger", BUDGET) as ledger:
            ledger.begin(mechanism.plan, name="mine")
            release_next(ledger, sampler, mechanism, model)
    assert query.times.max() >= 2
    assert query.times.max() <= events_charged(tmp_path / "ledger", mechanism.plan)


def test_batches_that_were_drawn_and_not_released(tmp_path):
    """Skipping batches moves the sampler on to the next epoch, while the ledger stays behind."""
    query, model = Attendance(), one_weight()
    sampler, mechanism = fresh(query, 0)
    try:
        with Ledger(tmp_path / "ledger", BUDGET) as ledger:
            for step in range(8):
                if step in (0, 1, 4, 5):
                    sampler.next_batch()
                else:
                    release_next(ledger, sampler, mechanism, model)
    except TacitError:
        return  # refusing to go on is an answer too
    assert query.times.max() <= events_charged(tmp_path / "ledger", mechanism.plan)
