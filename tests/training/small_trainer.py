"""A trainer of a few steps, to be changed where a test needs it."""

from __future__ import annotations

import torch
from torch import nn

import tacit


def some_records(count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return tacit.Records(inputs, (inputs[:, 0] > 0).long(), 2, public_size=count or None)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def small_trainer(model=None, records=None, steps=4, **more):
    model = network() if model is None else model
    records = some_records() if records is None else records
    settings = {
        "loss": tacit.losses.CrossEntropy(),
        "query": tacit.PerSampleClip(0.5),
        "sampler": tacit.PoissonSampler(records, 0.25, steps=steps),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "budget": tacit.Budget(8.0, 1e-3),
        "noise": tacit.Noise(2.0),
        "callbacks": (),
    }
    return tacit.Trainer(model, **(settings | more))
