"""Small networks with BatchNorm, and a ledger that has planned for a release."""

from __future__ import annotations

import dp_accounting as dpa
import torch
from torch import nn

from tacit import Budget, Ledger, Records, Relation
from tacit.accounting import Plan
from tacit.sampling import Poisson

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def image_net(seed: int = 0) -> nn.Sequential:
    """Two BatchNorms, of 3 and 4 channels, over images of 2×4×4."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def images(count: int = 24, seed: int = 0, **more) -> Records:
    inputs = torch.randn(count, 2, 4, 4, generator=generator(seed))
    targets = torch.randint(2, (count,), generator=generator(seed + 1))
    settings = {"public_size": count, "num_classes": 2, "name": f"images-{seed}"} | more
    return Records(inputs, targets, **settings)


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


def ledger_for(event: dpa.DpEvent, relation: Relation = ADD, path=None) -> Ledger:
    """A ledger in which a run that has planned for the event has begun."""
    ledger = Ledger(path, Budget(1e20, 1e-5, relation))
    ledger.begin(Plan(Poisson(1.0), 5.0, relation, 1, prelude=(event,)))
    return ledger
