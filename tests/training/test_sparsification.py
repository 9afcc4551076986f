"""Entries that hover within the noise are found, fixed, and left alone from then on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tacit
from tacit import BatchClip, PerSampleClip, Records
from tacit.engines import PerRecord
from tacit.losses import CrossEntropy
from tacit.training import Sparsification


def two_features(n: int = 400) -> Records:
    """The class is the sign of the first feature; the other three are always zero."""
    torch.manual_seed(0)
    inputs = torch.zeros(n, 4, dtype=torch.float64)
    inputs[:, 0] = torch.sign(torch.randn(n))
    return Records(inputs, (inputs[:, 0] > 0).long(), public_size=n)


def trained(query, frozen, steps, sampler=None, **options):
    torch.manual_seed(0)
    records = two_features()
    model = nn.Linear(4, 2, bias=False).double()
    sampler = (
        sampler(records, steps)
        if sampler
        else tacit.PoissonSampler(records, expected_batch_size=200, steps=steps)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    trainer = tacit.Trainer(
        model,
        CrossEntropy(),
        query,
        sampler,
        optimizer,
        tacit.Budget(1000.0, 1e-5),
        noise=tacit.Noise(options.get("noise", 1.0)),
        callbacks=[frozen],
        seed=3,
    )
    trainer.fit()
    return trainer


def mini_sets(records, steps):
    return tacit.MiniSetSampler(records, 10, steps, chosen=20)


@pytest.mark.parametrize(
    ("make", "sampler"),
    [
        (lambda frozen: PerSampleClip(1.0, frozen=frozen), None),
        (lambda frozen: PerSampleClip(1.0, frozen=frozen, engine=PerRecord()), None),
        (lambda frozen: BatchClip(1.0, 10, frozen=frozen), mini_sets),
        (
            lambda frozen: BatchClip(1.0, 10, frozen=frozen, engine=tacit.queries.SetBySet()),
            mini_sets,
        ),
    ],
    ids=["book-keeping", "per-record", "sets-as-records", "set-by-set"],
)
def test_entries_without_a_gradient_freeze_and_the_others_do_not(make, sampler):
    frozen = Sparsification(window=10, tolerance=2.0)
    trainer = trained(make(frozen), frozen, 10, sampler)
    (mask,) = frozen.active(trainer.model).values()
    assert mask[:, 0].all()
    assert (~mask[:, 1:]).float().mean() > 0.6
    assert frozen.share_frozen == pytest.approx(float((~mask).double().mean()))


def test_a_frozen_entry_is_its_mean_over_the_window_and_stays():
    frozen = Sparsification(window=10, tolerance=3.0)
    seen: list[torch.Tensor] = []

    class Watch(tacit.Callback):
        def on_step(self, trainer, step):
            seen.append(trainer.model.weight.detach().clone())

    torch.manual_seed(0)
    records = two_features()
    model = nn.Linear(4, 2, bias=False).double()
    trainer = tacit.Trainer(
        model,
        CrossEntropy(),
        PerSampleClip(1.0, frozen=frozen),
        tacit.PoissonSampler(records, expected_batch_size=200, steps=25),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        tacit.Budget(1000.0, 1e-5),
        noise=tacit.Noise(1.0),
        callbacks=[Watch(), frozen],
        seed=3,
    )
    trainer.fit()
    (mask,) = frozen.active(model).values()
    assert (~mask[:, 1:]).all()
    mean = torch.stack(seen[:10]).mean(dim=0)
    torch.testing.assert_close(model.weight[:, 1:], mean[:, 1:])


def test_frozen_entries_are_released_as_zero_and_leave_room_for_the_rest():
    frozen = Sparsification(window=5, tolerance=1e6)  # everything is within the noise
    trainer = trained(PerSampleClip(1.0, frozen=frozen), frozen, 5)
    assert frozen.share_frozen == 1.0
    model = trainer.model
    records = two_features()
    batch = tacit.PoissonSampler(records, 1.0, steps=1).next_batch()
    (block,) = PerSampleClip(1.0, frozen=frozen)(model, CrossEntropy(), batch).blocks
    assert not block.sums[0].any()


def test_what_is_frozen_depends_on_releases_alone():
    """The same releases, other records: the same masks. (Noise drowns all gradients here.)"""
    frozen = Sparsification(window=5)
    model = trained(PerSampleClip(1e-9, frozen=frozen), frozen, 5, noise=1e9).model
    first = {n: m.clone() for n, m in frozen.active(model).items()}
    again = Sparsification(window=5)
    model = trained(PerSampleClip(1e-9, frozen=again), again, 5, noise=1e9).model
    masks = again.active(model)
    assert all(torch.equal(first[n], m) for n, m in masks.items())
    # About two thirds of what is only noise stay within one standard deviation.
    assert 0.2 < again.share_frozen < 1.0


def test_a_run_starts_with_nothing_frozen():
    frozen = Sparsification(window=5, tolerance=1e6)
    trained(PerSampleClip(1.0, frozen=frozen), frozen, 5)
    trained(PerSampleClip(1.0, frozen=frozen), frozen, 3)
    assert frozen.share_frozen == 0.0


@pytest.mark.parametrize("wrong", [{"window": 0}, {"tolerance": 0.0}, {"tolerance": float("nan")}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="give"):
        Sparsification(**wrong)
