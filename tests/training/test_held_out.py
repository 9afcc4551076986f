"""Training records are not evaluated on, unless the run says so."""

import copy
import gc
import pickle
import weakref
from dataclasses import astuple, replace

import pytest
import torch
from small_trainer import small_trainer, some_records

import tacit
from tacit.errors import NotPublic
from tacit.queries.record_overlap import require_held_out
from tacit.training import Unprotected
from tacit.training.preconditions import TRAINING_METRICS, UNPROTECTED_METRICS

TRAIN = some_records()
COPY = replace(TRAIN, inputs=TRAIN.inputs.clone(), targets=TRAIN.targets.clone(), name="copy")


def joined(*parts):
    return tacit.Records(
        torch.cat([p.inputs for p in parts]), torch.cat([p.targets for p in parts]), 2
    )


def part(records, rows):
    return tacit.Records(records.inputs[rows], records.targets[rows], 2)


@pytest.mark.parametrize(
    "same",
    [
        TRAIN,
        COPY,
        part(TRAIN, slice(39, None)),
        part(TRAIN, slice(None, None, 7)),
        part(COPY, torch.randperm(40)),
        # Few held-out records before many training records are found too.
        joined(some_records(64, seed=8), *[TRAIN] * 4),
    ],
)
def test_training_records_are_refused(same):
    with pytest.raises(NotPublic, match=r"evaluate_on.*training records.*Unprotected"):
        small_trainer(records=TRAIN, evaluate_on=same)


def test_held_out_records_pass():
    whole = some_records(60)
    train, test = part(whole, slice(40)), part(whole, slice(40, None))  # of one memory
    require_held_out(test, train)
    require_held_out(part(whole, slice(1, None, 2)), part(whole, slice(0, None, 2)))
    require_held_out(joined(some_records(seed=9), part(train, slice(3))), train)
    require_held_out(some_records(0), train)
    relabelled = replace(COPY, targets=1 - TRAIN.targets)
    require_held_out(relabelled, TRAIN)  # one input may be of two classes


@pytest.mark.parametrize("kind", [torch.bool, torch.long])
def test_scalar_inputs_of_any_kind_are_compared(kind):
    x = torch.arange(40).remainder(2).to(kind)
    some, other = tacit.Records(x, x.long()), tacit.Records(1 - x.long(), x.long())
    require_held_out(other, some)
    with pytest.raises(NotPublic):
        require_held_out(tacit.Records(x.clone(), x.long()), some)


def test_a_run_on_unprotected_records_says_so():
    run = small_trainer(records=TRAIN, evaluate_on=Unprotected(TRAIN)).fit()
    assert len(run.history) == 4
    assert UNPROTECTED_METRICS in run.notes
    held_out = small_trainer(records=TRAIN, evaluate_on=some_records(seed=9)).fit()
    assert UNPROTECTED_METRICS not in held_out.notes


def test_a_report_on_training_records_says_so():
    run = small_trainer(records=TRAIN).fit()
    for shown, expected in [(TRAIN, True), (COPY, True), (some_records(seed=9), False)]:
        assert (TRAINING_METRICS in run.facts(shown)["notes"]) is expected
        assert (TRAINING_METRICS[:30] in run.summary(shown)) is expected
    assert TRAINING_METRICS not in run.facts()["notes"]


def test_a_run_does_not_carry_its_records():
    trainer = small_trainer(records=some_records())
    run = trainer.fit()
    assert TRAINING_METRICS in run.facts(trainer.sampler.records)["notes"]
    again = pickle.loads(pickle.dumps(run))
    assert again.epsilon == run.epsilon
    copy.deepcopy(run)
    assert not any(
        isinstance(value, tacit.Records) for value in [*vars(run).values(), *astuple(run)]
    )
    kept = weakref.ref(trainer.sampler.records)
    del trainer
    gc.collect()
    assert kept() is None


def test_training_records_are_refused_afterwards_too():
    trainer = small_trainer(records=TRAIN)
    with pytest.raises(NotPublic):
        trainer.evaluate_on = COPY
    trainer.evaluate_on = some_records(seed=9)
    assert len(trainer.fit().history) == 4


def test_held_out_records_may_be_a_dataset():
    held_out = some_records(seed=1)
    dataset = torch.utils.data.TensorDataset(held_out.inputs, held_out.targets)
    from_dataset, from_records = (
        small_trainer(evaluate_on=given, seed=0).fit() for given in (dataset, held_out)
    )
    assert from_dataset.history == from_records.history
