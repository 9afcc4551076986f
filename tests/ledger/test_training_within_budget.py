"""The trainer's ε is that of what was planned and charged, however the run ended."""

import pytest
import torch
from torch import nn

from tacit import (
    Budget,
    Callback,
    Ledger,
    Noise,
    PerSampleClip,
    PoissonSampler,
    Records,
    Trainer,
)
from tacit.training import LedgerRun, Unprotected
from tacit.training.preconditions import RESUMED

BUDGET = Budget(2.0, 1e-5)


def data():
    inputs = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    return Records(inputs, (inputs[:, 0] > 0).long(), num_classes=2, public_size=60)


def trainer(steps=12, rate=1.0, **more):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    sampler = PoissonSampler(data(), sampling_rate=rate, steps=steps)
    return Trainer(
        model,
        nn.CrossEntropyLoss(),
        PerSampleClip(1.0),
        sampler,
        torch.optim.SGD(model.parameters(), lr=0.1),
        BUDGET,
        **({"callbacks": ()} | more),
    )


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, step):
        if step == self.step:
            trainer.stop()


def test_a_calibrated_run_just_fits():
    run = trainer().fit()
    assert run.stopped == "plan complete"
    assert run.steps == 12
    assert 0.999 * BUDGET.epsilon <= run.epsilon <= BUDGET.epsilon
    assert run.epsilon <= run.epsilon_rdp


def test_stopping_by_choice_costs_the_whole_plan():
    run = trainer(callbacks=[StopAt(3)]).fit()
    assert (run.steps, run.stopped) == (3, "asked to")
    assert run.epsilon == run.plan.epsilon(12, BUDGET.delta)
    assert any("whole plan" in note for note in run.notes)


def test_an_interrupt_is_a_choice_too():
    class Interrupt(Callback):
        def on_step(self, trainer, step):
            if step == 2:
                raise KeyboardInterrupt

    run = trainer(callbacks=[Interrupt()]).fit()
    assert run.stopped == "interrupted"
    assert run.epsilon == run.plan.epsilon(12, BUDGET.delta)


@pytest.mark.parametrize(("z", "rate"), [(8.0, 1.0), (0.9, 0.2)])
def test_the_budget_ends_a_run_in_good_order(z, rate):
    made = trainer(steps=5000, noise=Noise(z), rate=rate)
    run = made.fit()
    assert run.stopped == "budget"
    assert run.steps == made.plan.steps_within(BUDGET)
    assert run.epsilon <= BUDGET.epsilon < made.plan.epsilon(run.steps + 1, BUDGET.delta)


def test_early_stop_where_the_budget_is_shorter_than_the_plan():
    made = trainer(steps=5000, noise=Noise(8.0), callbacks=[StopAt(3)])
    run = made.fit()
    assert run.epsilon == made.plan.epsilon(made.plan.steps_within(BUDGET), BUDGET.delta)


def test_a_run_that_goes_on_answers_for_both_processes(tmp_path):
    path = tmp_path / "ledger"
    noise, ledger = Noise(10.0), LedgerRun(path, "mine")
    trainer(noise=noise, ledger=ledger, callbacks=[StopAt(5)]).fit()
    run = trainer(noise=noise, ledger=ledger).fit()
    assert run.steps == 7
    assert run.epsilon == run.plan.epsilon(12, BUDGET.delta)
    with Ledger(path) as ledger:
        assert ledger.statement().runs[0].steps == 12


def test_what_is_shown_on_the_way_counts_both_processes(tmp_path):
    settings = {"noise": Noise(10.0), "ledger": LedgerRun(tmp_path / "ledger", "mine")}
    trainer(callbacks=[StopAt(5)], **settings).fit()
    run = trainer(evaluate_on=Unprotected(data(), every=1), **settings).fit()
    first = run.history[0]
    assert first.epsilon >= run.plan.epsilon(6, BUDGET.delta) * (1 - 1e-3)


def test_a_second_run_on_the_ledger_is_held_to_what_is_left(tmp_path):
    settings = {"noise": Noise(12.0), "ledger": tmp_path / "ledger"}
    first = trainer(steps=10, **settings).fit()
    second = trainer(steps=1000, **settings).fit()
    assert first.stopped == "plan complete"
    assert second.stopped == "budget"
    assert second.steps < second.plan.steps_within(BUDGET)
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.statement().epsilon <= BUDGET.epsilon


def test_a_resumed_run_says_that_its_weights_are_not_from_the_ledger(tmp_path):
    ledger = LedgerRun(tmp_path / "ledger.sqlite", name="one")
    whole = trainer(ledger=ledger).fit()
    assert RESUMED not in whole.notes
    resumed = trainer(ledger=ledger).fit()
    assert resumed.steps == 0
    assert RESUMED in resumed.notes
