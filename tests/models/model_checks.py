"""One private step of a network, by the default engine and by running each record alone."""

from __future__ import annotations

import torch
from torch import nn

from tacit import PerSampleClip
from tacit.engines import PerRecord
from tacit.sampling import Poisson, batch_of


def batch_for(inputs, targets=None):
    targets = torch.arange(len(inputs)) % 2 if targets is None else targets
    return batch_of(inputs, targets, divisor=1.0, scheme=Poisson(0.5))


def sums_of(model, batch, loss, engine=None):
    (block,) = PerSampleClip(0.1, engine=engine)(model, loss, batch).blocks
    return dict(zip(block.names, block.sums, strict=True))


def assert_exact(model, inputs, targets=None, loss=None, tolerance=1e-9) -> None:
    """The default engine's clipped sums are those of records run alone."""
    batch, loss = batch_for(inputs, targets), loss or nn.CrossEntropyLoss()
    found, alone = sums_of(model, batch, loss), sums_of(model, batch, loss, PerRecord())
    scale = torch.cat([s.flatten() for s in alone.values()]).norm()
    assert scale > 0
    for name, expected in alone.items():
        assert (found[name] - expected).norm() <= tolerance * scale, name
