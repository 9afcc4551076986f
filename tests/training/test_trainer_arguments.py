"""What a trainer cannot work with is refused when it is made."""

import copy

import numpy as np
import pytest
import torch
from small_trainer import network, small_trainer, some_records

from tacit import HeldOut


def test_an_optimizer_of_another_model_is_refused():
    model = network()
    other = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer holds none of the model's 4 .*copy"):
        small_trainer(model, optimizer=other)


def test_an_optimizer_of_a_part_is_noted():
    model = network()
    run = small_trainer(model, optimizer=torch.optim.SGD(model[2].parameters(), lr=0.1)).fit()
    assert any("leaves out 2 of the model's 4 trainable" in note for note in run.notes)
    assert torch.equal(model[0].weight, network()[0].weight)
    assert not torch.equal(model[2].weight, network()[2].weight)


def test_an_optimizer_of_all_that_is_trained_is_not_noted():
    model = network()
    model[0].requires_grad_(False)
    trainer = small_trainer(model, optimizer=torch.optim.SGD(model[2].parameters(), lr=0.1))
    assert not any("leaves out" in note for note in trainer.notes)


@pytest.mark.parametrize("every", [0, -1, 2.5, 2.0, "2", True])
def test_steps_between_evaluations_are_a_whole_number(every):
    with pytest.raises(ValueError, match=r"every is .*; give a whole number, 1 or more"):
        HeldOut(some_records(seed=9), every)


@pytest.mark.parametrize("every", [2, np.int64(2)])
def test_steps_between_evaluations_are_kept(every):
    run = small_trainer(evaluate_on=HeldOut(some_records(seed=9), every)).fit()
    assert [evaluation.step for evaluation in run.history] == [2, 4]
