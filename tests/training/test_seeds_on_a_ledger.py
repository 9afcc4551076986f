"""A seed that is used again on a ledger draws neither its noise nor its batches again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tacit
from tacit.noise import NoiseSource

DATA = tacit.Records(torch.randn(40, 3), torch.randint(2, (40,)), public_size=40, num_classes=2)


def trained(ledger, name, monkeypatch, epsilon=8.0, stop_after=None):
    """The run, and all noise and batches that it drew."""
    drawn, rows = [], []
    normal, batch = NoiseSource.normal, tacit.PoissonSampler.next_batch

    def noted(source, *args):
        found = normal(source, *args)
        drawn.append(found.clone())
        return found

    def watched(sampler):
        found = batch(sampler)
        rows.append(found.indices.tolist())
        return found

    class Stop(tacit.Callback):
        def on_step(self, trainer, step):
            if step == stop_after:
                trainer.stop()

    model = nn.Linear(3, 2)
    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "normal", noted)
        patch.setattr(tacit.PoissonSampler, "next_batch", watched)
        run = tacit.Trainer(
            model,
            tacit.losses.CrossEntropy(),
            tacit.PerSampleClip(1.0),
            tacit.PoissonSampler(DATA, expected_batch_size=20, steps=6),
            torch.optim.SGD(model.parameters(), lr=0.1),
            tacit.Budget(epsilon, 1e-5),
            noise_multiplier=5.0,
            ledger=ledger,
            run_name=name,
            callbacks=[Stop()],
            progress=False,
            seed=7,
        ).fit()
    return run, drawn, rows


@pytest.mark.parametrize("names", [("one", "two"), ("one", "one")])
def test_a_seed_draws_anew(names, tmp_path, monkeypatch):
    _, noise, rows = trained(tmp_path / "l", names[0], monkeypatch, stop_after=3)
    _, noise_again, rows_again = trained(tmp_path / "l", names[1], monkeypatch)
    assert len(noise) >= 3
    assert not any(torch.equal(a, b) for a in noise for b in noise_again)
    assert rows[:3] != rows_again[:3]
    # On a ledger of its own, the same seed is the same run.
    _, noise_elsewhere, _ = trained(tmp_path / "m", names[0], monkeypatch, stop_after=3)
    assert all(map(torch.equal, noise, noise_elsewhere))


def test_a_smaller_budget_does_not_forget_what_was_charged(tmp_path, monkeypatch):
    """Gone on with under a budget below what was spent, a run still answers for all of it."""
    with tacit.Ledger(tmp_path / "l", tacit.Budget(8.0, 1e-5)) as ledger:
        first, *_ = trained(ledger, "one", monkeypatch, stop_after=4)
        less = first.plan.epsilon(2, 1e-5)
        second, *_ = trained(ledger, "one", monkeypatch, epsilon=less)
    assert second.steps == 0
    assert second.epsilon >= first.plan.epsilon(4, 1e-5)
    assert any("larger one" in note for note in second.notes)
