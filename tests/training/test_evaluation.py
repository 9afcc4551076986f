"""What is said of held-out records, and what is left of the weights after it."""

import pytest
import torch
from small_trainer import network, small_trainer, some_records

import tacit
from tacit.report import save_run

NONE = some_records(0)
TEST = some_records(seed=9)


def test_without_records_there_is_no_accuracy(tmp_path):
    found = tacit.evaluate(network(), NONE, tacit.losses.CrossEntropy())
    assert (found.accuracy, found.loss) == (None, None)
    run = small_trainer(evaluate_on=NONE).fit()
    assert run.history == []
    facts = save_run(run, tmp_path, NONE)
    assert facts["accuracy"] is facts["loss"] is facts["certificate"] is None
    assert '"accuracy": null' in (tmp_path / "run.json").read_text()
    (row,) = [line for line in run.summary(NONE).splitlines() if "metrics" in line]
    assert "none" in row
    assert "accuracy" not in run.summary(NONE)


@pytest.mark.parametrize("steps", [4, 150])
@pytest.mark.parametrize("noise", [2.0, 5.0])
def test_the_history_is_never_above_the_run(steps, noise):
    run = small_trainer(
        steps=steps,
        evaluate_on=tacit.HeldOut(TEST, every=2),
        noise=tacit.Noise(noise),
        budget=tacit.Budget(100.0, 1e-3),
    ).fit()
    spent = [evaluation.epsilon for evaluation in run.history]
    assert spent == sorted(spent)
    assert spent[-1] == run.epsilon


class Recorded(tacit.Callback):
    """Keeps each step's own weights, and interrupts an evaluation."""

    def __init__(self):
        self.weights = []

    def on_step(self, trainer, step):
        self.weights.append(trainer.model[0].weight.detach().clone())

    def on_evaluation(self, trainer, evaluation):
        if evaluation.step == 3:
            raise KeyboardInterrupt


def test_an_interrupted_evaluation_leaves_the_average():
    recorded, average = Recorded(), tacit.MovingAverage(0.9)
    run = small_trainer(
        evaluate_on=tacit.HeldOut(TEST, every=3), moving_average=average, callbacks=[recorded]
    ).fit()
    assert (run.stopped, run.steps) == ("interrupted", 3)
    expected = recorded.weights[0]  # the average begins after step 1
    for t, weight in enumerate(recorded.weights, start=1):
        decay = min(0.9, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * weight
    torch.testing.assert_close(run.model[0].weight.detach(), expected)


def test_the_average_is_applied_for_a_while_only():
    model, average = network(), tacit.MovingAverage(0.5)
    average.update(model)
    begun = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1.0)

    def fails():
        with average.applied(model):
            assert torch.equal(model[0].weight, begun)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert torch.equal(model[0].weight, begun + 1)
