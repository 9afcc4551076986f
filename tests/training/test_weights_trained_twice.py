"""ε answers for all that the weights have taken, or the run says that it does not."""

import pytest
import torch
from small_trainer import network, small_trainer
from torch import nn

import tacit
from tacit.errors import PlanChanged
from tacit.training.earlier_runs import TRAINED_BEFORE


class StopAt(tacit.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, step):
        if step == self.step:
            trainer.stop()


def test_a_second_fit_without_a_ledger_is_refused():
    trainer = small_trainer()
    trainer.fit()
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(PlanChanged, match=r"fit\(\).*new Trainer.*ledger"):
        trainer.fit()
    assert all(map(torch.equal, weights, trainer.model.parameters()))


def test_a_fit_that_released_nothing_may_be_called_again():
    class Fails(tacit.Callback):
        fails = True

        def on_begin(self, trainer):
            if self.fails:
                raise OSError

    trainer = small_trainer(callbacks=[fails := Fails()])
    with pytest.raises(OSError):  # noqa: PT011 (raised with no words)
        trainer.fit()
    fails.fails = False
    assert trainer.fit().steps == 4


def test_a_second_fit_on_a_ledger_is_charged(tmp_path):
    trainer = small_trainer(ledger=tmp_path / "ledger", budget=tacit.Budget(30.0, 1e-3))
    runs = [trainer.fit(), trainer.fit()]
    assert [run.steps for run in runs] == [4, 4]
    assert not any(TRAINED_BEFORE in run.notes for run in runs)
    with tacit.Ledger(tmp_path / "ledger") as ledger:
        assert [charge.steps for charge in ledger.statement().runs] == [4, 4]


def test_fit_goes_on_with_its_run_after_a_stop(tmp_path):
    trainer = small_trainer(ledger=tmp_path / "ledger", run_name="mine", callbacks=[StopAt(1)])
    assert trainer.fit().steps == 1
    trainer.callbacks.clear()
    run = trainer.fit()
    assert run.steps == 3
    assert run.epsilon == run.plan.epsilon(4, 1e-3)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.Sequential(model)])
def test_weights_of_another_run_are_noted(wrap):
    model = network()
    assert TRAINED_BEFORE not in small_trainer(model).fit().notes
    assert TRAINED_BEFORE in small_trainer(wrap(model)).fit().notes
    assert TRAINED_BEFORE not in small_trainer().fit().notes


def test_one_ledger_counts_both(tmp_path):
    wide = tacit.Budget(30.0, 1e-3)
    file = tmp_path / "ledger"
    with tacit.Ledger(file, wide) as opened, tacit.Ledger(None, wide) as memory:
        for ledgers in ([file, str(file), opened], [memory, memory]):
            model = network()
            for ledger in ledgers:
                run = small_trainer(model, ledger=ledger, budget=wide).fit()
                assert TRAINED_BEFORE not in run.notes
            assert TRAINED_BEFORE in small_trainer(model).fit().notes
