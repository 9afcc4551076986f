"""A model that carries something from pass to pass is refused, wherever it keeps it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import tacit
from tacit.errors import MixesRecords
from tacit.queries import SetBySet

torch.set_num_threads(1)
N = 32
RECORDS = tacit.Records(
    torch.randn(N, 6, generator=torch.Generator().manual_seed(0)),
    torch.arange(N) % 3,
    num_classes=3,
    public_size=N,
)
LOSS = tacit.losses.CrossEntropy()


class Net(nn.Module):
    """A mean of all inputs seen, kept in one place or another."""

    def __init__(self, where: str, norm: bool) -> None:
        super().__init__()
        self.where = where
        own = nn.BatchNorm1d(6, track_running_stats=False) if norm else nn.Identity()
        self.body = nn.Sequential(own, nn.Linear(6, 3))
        self.memory = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("count", torch.ones(1))
        self.kept, self.held = torch.ones(1), [torch.ones(1)]
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x):
        seen = x.detach().mean()
        if self.where == "parameter.data":
            self.memory.data.add_(seen)
            scale = self.memory.data
        elif self.where == "buffer.data":
            self.count.data.add_(seen)
            scale = self.count
        elif self.where == "list":
            self.held[0].add_(seen)
            scale = self.held[0]
        elif self.where == "attribute":
            scale, self.kept = self.kept, seen
        elif self.where == "note":
            scale, self.kept = 1.0, seen
        elif self.where == "generator":
            scale = torch.rand((), generator=self.own)
        elif self.where == "uncopied":
            scale, self.kept = self.kept, seen
            self.last = self.body(x)  # which no copy can be made of
        else:
            scale = 1.0 + (random.random() < 0.5)
        return self.body(x) * scale


LOCAL = tacit.queries.LocalRun(lambda parameters: torch.optim.SGD(parameters, lr=0.1), at_once=2)
QUERIES = {
    "records": (lambda: tacit.PerSampleClip(0.1), 1),
    "sets": (lambda: tacit.BatchClip(0.1, 4), 4),
    "set by set": (lambda: tacit.BatchClip(0.1, 4, engine=SetBySet()), 4),
    "local runs": (lambda: tacit.BatchClip(0.1, 4, gradient=LOCAL), 4),
}


def ask(kind: str, where: str) -> None:
    make, size = QUERIES[kind]
    if size > 1:
        sampler = tacit.MiniSetSampler(RECORDS, size, steps=1, rate=1.0, seed=0)
    else:
        sampler = tacit.PoissonSampler(RECORDS, expected_batch_size=N, steps=1)
    torch.manual_seed(1)
    make()(Net(where, norm=size > 1), LOSS, sampler.next_batch())


@pytest.mark.parametrize("kind", QUERIES)
@pytest.mark.parametrize(
    "where", ["parameter.data", "buffer.data", "list", "attribute", "uncopied"]
)
def test_memory_is_refused(kind: str, where: str) -> None:
    with pytest.raises(MixesRecords, match=r"stateful|written"):
        ask(kind, where)


@pytest.mark.parametrize("kind", ["sets", "set by set", "local runs"])
@pytest.mark.parametrize("where", ["note", "random", "generator"])
def test_a_note_and_chance_are_not_memory(kind: str, where: str) -> None:
    for _ in range(8):
        ask(kind, where)


@pytest.mark.parametrize(
    "normed", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm]
)
def test_spectral_normalisation_is_of_weights_alone(normed) -> None:
    sampler = tacit.MiniSetSampler(RECORDS, 4, steps=1, rate=1.0, seed=0)
    for seed in range(8):
        torch.manual_seed(seed)
        model = nn.Sequential(normed(nn.Linear(6, 8)), nn.BatchNorm1d(8), nn.Linear(8, 3))
        tacit.BatchClip(0.1, 4)(model, LOSS, sampler.next_batch())
        assert model[0].training


def test_a_note_is_not_memory_for_records_either() -> None:
    ask("records", "note")
