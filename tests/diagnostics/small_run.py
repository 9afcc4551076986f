"""A run of a few steps with diagnostics on it."""

from __future__ import annotations

import torch
from torch import nn

import tacit

torch.set_num_threads(1)


def some_records(count=48, seed=0, classes=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    return tacit.Records(x, y % classes, classes, public_size=count)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def fit(callbacks, records=None, loss=None, steps=8, rate=0.25, test=None, model=None):
    records = some_records() if records is None else records
    model = network() if model is None else model
    trainer = tacit.Trainer(
        model,
        loss or tacit.losses.CrossEntropy(),
        tacit.PerSampleClip(0.5),
        tacit.PoissonSampler(records, rate, steps=steps),
        torch.optim.SGD(model.parameters(), lr=0.5),
        tacit.Budget(8.0, 1e-3),
        callbacks=callbacks,
        evaluate_on=None if test is None else tacit.HeldOut(test, every=2),
        seed=1,
    )
    return trainer.fit()
