"""ε answers for all that the weights have taken, or the run says that it does not."""

import pytest
import torch
from small_trainer import network, small_trainer
from torch import nn

import tacit
from tacit import LedgerRun
from tacit.errors import PlanChanged
from tacit.training.preconditions import ROW_NUMBERS, TRAINED_BY_OTHER_RUN, TRAINED_OUTSIDE_LEDGER
from tacit.training.run import ENDED_EARLY


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
    assert not any(TRAINED_OUTSIDE_LEDGER in run.notes for run in runs)
    assert [TRAINED_BY_OTHER_RUN in run.notes for run in runs] == [False, True]
    with tacit.Ledger(tmp_path / "ledger") as ledger:
        assert [charge.steps for charge in ledger.statement().runs] == [4, 4]


def test_fit_goes_on_with_its_run_after_a_stop(tmp_path):
    trainer = small_trainer(ledger=LedgerRun(tmp_path / "ledger", "mine"), callbacks=[StopAt(1)])
    assert trainer.fit().steps == 1
    trainer.callbacks.clear()
    run = trainer.fit()
    assert run.steps == 3
    assert run.epsilon == run.plan.epsilon(4, 1e-3)
    assert TRAINED_BY_OTHER_RUN not in run.notes


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.Sequential(model)])
def test_weights_of_another_run_are_noted(wrap):
    model = network()
    assert TRAINED_OUTSIDE_LEDGER not in small_trainer(model).fit().notes
    assert TRAINED_OUTSIDE_LEDGER in small_trainer(wrap(model)).fit().notes
    assert TRAINED_OUTSIDE_LEDGER not in small_trainer().fit().notes


def test_one_ledger_counts_both(tmp_path):
    wide = tacit.Budget(30.0, 1e-3)
    file = tmp_path / "ledger"
    with tacit.Ledger(file, wide) as opened, tacit.Ledger(None, wide) as memory:
        for ledgers in ([file, str(file), opened], [memory, memory]):
            model = network()
            for ledger in ledgers:
                run = small_trainer(model, ledger=ledger, budget=wide).fit()
                assert TRAINED_OUTSIDE_LEDGER not in run.notes
            assert TRAINED_OUTSIDE_LEDGER in small_trainer(model).fit().notes


def test_weights_that_a_crashed_run_left_are_noted(tmp_path):
    class Fails(tacit.Callback):
        def on_step(self, trainer, step):
            if step == 2:
                raise OSError

    wide = tacit.Budget(30.0, 1e-3)
    trainer = small_trainer(ledger=tmp_path / "ledger", budget=wide, callbacks=[Fails()])
    with pytest.raises(OSError):  # noqa: PT011 (raised with no words)
        trainer.fit()
    trainer.callbacks.clear()
    assert TRAINED_BY_OTHER_RUN in trainer.fit().notes


def test_a_moving_average_is_of_one_run_alone():
    """One object for a sweep: the weights of the first run were in the second's model."""
    average = tacit.MovingAverage(0.9)
    first = network()
    small_trainer(first, moving_average=average, noise=tacit.Noise(0.1), budget=LARGE).fit()
    second = network()
    begun = [p.detach().clone() for p in second.parameters()]
    still = torch.optim.SGD(second.parameters(), lr=1e-12)
    small_trainer(second, moving_average=average, optimizer=still).fit()
    assert all(torch.allclose(a, b) for a, b in zip(begun, second.parameters(), strict=True))


LARGE = tacit.Budget(1e6, 1e-3)


def test_a_smaller_budget_later_does_not_make_less_of_the_plan(tmp_path):
    """The run was planned for 40 steps, and where to stop is chosen in view of the first."""
    given = {"steps": 40, "ledger": LedgerRun(tacit.Ledger(tmp_path / "ledger", LARGE), "mine")}
    first = small_trainer(budget=LARGE, callbacks=[StopAt(1)], **given).fit()
    smaller = tacit.Budget(first.plan.epsilon(5, 1e-3), 1e-3)
    run = small_trainer(budget=smaller, **given).fit()
    assert run.stopped == "budget"
    assert run.epsilon == first.epsilon == run.plan.epsilon(40, 1e-3)
    assert ENDED_EARLY in run.notes


def test_the_budget_that_is_reported_is_the_one_that_was_begun_with():
    class Changes(tacit.Callback):
        def on_step(self, trainer, step):
            trainer.budget = tacit.Budget(8.0, 1e-12)

    run = small_trainer(callbacks=[Changes()]).fit()
    assert run.budget.delta == 1e-3
    assert run.epsilon == run.plan.epsilon(4, 1e-3)


def test_another_run_on_the_same_ledger_in_between_is_refused(tmp_path):
    with tacit.Ledger(tmp_path / "ledger", LARGE) as book:

        class Nested(tacit.Callback):
            def on_step(self, trainer, step):
                small_trainer(ledger=book).fit()

        with pytest.raises((PlanChanged, ValueError), match=r"another run|no run"):
            small_trainer(ledger=book, callbacks=[Nested()]).fit()


@pytest.mark.parametrize("relation", ["add-or-remove-one", "replace-one"])
@pytest.mark.parametrize("ids", [None, torch.arange(40)])
def test_row_numbers_in_the_place_of_ids_are_noted(ids, relation):
    records = tacit.Records(
        torch.randn(40, 4), torch.arange(40) % 2, 2, public_size=40, record_ids=ids
    )
    run = small_trainer(
        records=records,
        query=tacit.BatchClip(0.5, 4),
        sampler=tacit.MiniSetSampler(records, 4, steps=2, rate=0.5),
        budget=tacit.Budget(1e4, 1e-3, relation),
    ).fit()
    assert (ROW_NUMBERS in run.notes) is (ids is None and relation == "add-or-remove-one")
