"""A seed that is used again on a ledger draws neither its noise nor its batches again."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import tacit
from tacit.randomness import Stream

DATA = tacit.Records(torch.randn(40, 3), torch.randint(2, (40,)), public_size=40, num_classes=2)


def trained(ledger, name, monkeypatch, epsilon=8.0, stop_after=None):
    """The run, and all noise and batches that it drew."""
    drawn, rows = [], []
    normals, batch = Stream.flat_normals, tacit.PoissonSampler.next_batch

    def noted(stream, *args):
        found = normals(stream, *args)
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
        patch.setattr(Stream, "flat_normals", noted)
        patch.setattr(tacit.PoissonSampler, "next_batch", watched)
        run = tacit.Trainer(
            model,
            tacit.losses.CrossEntropy(),
            tacit.PerSampleClip(1.0),
            tacit.PoissonSampler(DATA, expected_batch_size=20, steps=6),
            torch.optim.SGD(model.parameters(), lr=0.1),
            tacit.Budget(epsilon, 1e-5),
            noise=tacit.Noise(5.0),
            ledger=tacit.LedgerRun(ledger, name),
            callbacks=[Stop()],
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


def own_loop(path, seed, records, name=None) -> torch.Tensor:
    """The README's second form: one step over all records; the gradient that is released."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    sampler = tacit.PoissonSampler(records, 1.0, steps=4, seed=seed)
    mechanism = tacit.Mechanism(tacit.PerSampleClip(1.0), sampler, 20.0, seed=seed)
    with tacit.Ledger(path, tacit.Budget(8.0, 1e-5)) as ledger:
        if name is not None:
            ledger.begin(mechanism.plan, name=name)
        for batch in sampler:
            private = mechanism.privatise(model, tacit.losses.CrossEntropy(), batch)
            ledger.release(private, into=model)
            break
    return torch.cat([p.grad.flatten() for p in model.parameters()]) * 40


@pytest.mark.parametrize("name", [None, "one"])
def test_a_loop_of_ones_own_never_repeats_a_seeds_noise(name, tmp_path):
    """Two runs of one seed, one record changed: their difference must not be that record alone."""
    neighbour = DATA.replaced(0, 50 * torch.ones(3), 1)
    first = own_loop(tmp_path / "l", 7, DATA, name)
    second = own_loop(tmp_path / "l", 7, neighbour, name)
    assert (first - second).norm() > 20  # independent noise: 20·√(2·8) = 80; one record: at most 2
    # On a fresh ledger the seed repeats the run: that is what it is for.
    assert torch.equal(own_loop(tmp_path / "m", 7, DATA, name), first)


def test_several_mechanisms_of_one_seed_in_one_run(tmp_path):
    """A new mechanism for each step counts from 0 again; the ledger's own count does not."""
    model = nn.Linear(3, 2)
    sampler = tacit.PoissonSampler(DATA, 1.0, steps=3)
    grads = []
    with tacit.Ledger(tmp_path / "l", tacit.Budget(8.0, 1e-5)) as ledger:
        for batch in sampler:
            mechanism = tacit.Mechanism(tacit.PerSampleClip(1.0), sampler, 20.0, seed=7)
            private = mechanism.privatise(model, tacit.losses.CrossEntropy(), batch)
            ledger.release(private, into=model)
            grads.append(model.weight.grad.flatten() * 40)
    assert all((a - b).norm() > 20 for a, b in itertools.pairwise(grads))


def test_one_mechanism_on_two_ledgers_does_not_repeat_its_noise():
    model = nn.Linear(3, 2)
    sampler = tacit.PoissonSampler(DATA, 1.0, steps=1)
    for seed in (None, 7):
        mechanism = tacit.Mechanism(tacit.PerSampleClip(1.0), sampler, 20.0, seed=seed)
        grads = []
        for _ in range(2):
            ledger = tacit.Ledger(None, tacit.Budget(8.0, 1e-5))
            loss = tacit.losses.CrossEntropy()
            ledger.release(mechanism.privatise(model, loss, sampler.next_batch()), into=model)
            grads.append(model.weight.grad.flatten() * 40)
        assert (grads[0] - grads[1]).norm() > 20


def test_a_seeded_release_of_other_records_has_other_noise():
    """Without a ledger nothing else could tell two releases of one seed apart."""
    x = torch.rand(50, 4)
    neighbour = x.clone()
    neighbour[0] = 1 - neighbour[0]

    def released(inputs):
        scaler, _ = tacit.data.release_statistics(
            inputs, 0.0, 1.0, noise_multiplier=20.0, public_size=50, seed=7
        )
        return scaler.mean

    assert torch.equal(released(x), released(x))
    assert (released(x) - released(neighbour)).norm() > 0.5
