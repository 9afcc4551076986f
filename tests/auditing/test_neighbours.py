"""Neighbour replay: right for every route and relation, and it sees the mistakes that it is for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from setups import LOSS, POISSON, PlainClip, lipschitz_mlp, mlp, records
from torch import nn

import tacit
from tacit import (
    AdaptiveNorm,
    BatchClip,
    Clipless,
    FixedSizeSampler,
    MiniSetSampler,
    PerSampleClip,
    Records,
    Relation,
    auditing,
)
from tacit.queries import Block

SETS = partial(MiniSetSampler, set_size=3, chosen=4)
ROUTES = {
    "per sample": (PerSampleClip(0.1), mlp, POISSON),
    "by layer, adaptive": (PerSampleClip(AdaptiveNorm(0.1), blocks=tacit.by_layer), mlp, POISSON),
    "mini-sets": (BatchClip(0.1, 3), mlp, SETS),
    "clipless": (Clipless(), lipschitz_mlp, POISSON),
    "a user's own": (PlainClip(), mlp, POISSON),
    "dropout": (PerSampleClip(0.1), lambda: nn.Sequential(mlp(), nn.Dropout(0.3)), POISSON),
}


@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_moves_by_its_sensitivity_at_most(route, relation):
    query, model, sampler = ROUTES[route]
    report = auditing.replay_neighbours(
        query, model(), LOSS, records(), relation=relation, sampler=sampler
    ).require()
    assert 0.4 < report.largest <= 1 + 1e-6


@pytest.mark.parametrize("route", ["per sample", "clipless"])
def test_other_types_and_physical_batches(route):
    query, model, _ = ROUTES[route]
    for dtype, cut in ((torch.float64, 5), (torch.bfloat16, None)):
        audited = (query, model().to(dtype), LOSS, records().to("cpu", dtype))
        auditing.replay_neighbours(*audited, company=6, max_physical=cut).require()
        auditing.replay_among_identical(*audited, sizes=(1028,)).require()


def test_inputs_that_are_tokens_or_trees():
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 2)

        def forward(self, tokens, weights):
            return self.head((self.embedding(tokens) * weights[..., None]).sum(1))

    inputs = {"tokens": torch.arange(40).reshape(8, 5) % 7, "weights": torch.rand(8, 5)}
    some = Records(inputs, torch.arange(8) % 2, num_classes=2)
    report = auditing.replay_neighbours(PerSampleClip(0.1), Reader(), LOSS, some).require()
    assert report.largest > 0.9


def test_the_model_and_the_query_are_left_as_they_were():
    model, query = mlp(), PerSampleClip(AdaptiveNorm(0.1))
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    auditing.replay_neighbours(query, model, LOSS, records())
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(state, torch.get_rng_state())


def changed(bounded, **fields):
    return replace(bounded, blocks=tuple(replace(b, **fields) for b in bounded.blocks))


class ThreePercent(PerSampleClip):
    def __call__(self, model, loss, batch):
        return changed(super().__call__(model, loss, batch), bound=0.097)


class WholeFromLayers(PerSampleClip):
    """Clips each layer and declares one block: √2 times too small."""

    def __call__(self, model, loss, batch):
        found = PerSampleClip(0.1, blocks=tacit.by_layer)(model, loss, batch)
        merged = Block(
            names=tuple(n for b in found.blocks for n in b.names),
            parameters=tuple(p for b in found.blocks for p in b.parameters),
            sums=tuple(s for b in found.blocks for s in b.sums),
            bound=found.blocks[0].bound,
        )
        return replace(found, blocks=(merged,))


class ReadsTheData(PerSampleClip):
    """A bound that follows the batch is as good as a released record."""

    def __call__(self, model, loss, batch):
        bounded = super().__call__(model, loss, batch)
        return changed(bounded, bound=bounded.blocks[0].bound * (1 + len(batch)))


class Refuses(PerSampleClip):
    def __call__(self, model, loss, batch):
        if not batch.inputs.isfinite().all():
            raise FloatingPointError("a record is not finite")
        return super().__call__(model, loss, batch)


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (ThreePercent, "times its declared sensitivity"),
        (WholeFromLayers, "times its declared sensitivity"),
        (ReadsTheData, "the bounds of the blocks"),
        (Refuses, "ends the step with an error"),
    ],
)
def test_mistakes_are_seen(planted, words):
    report = auditing.replay_neighbours(planted(0.1), mlp(), LOSS, records())
    assert words in "; ".join(report.faults)


def test_what_fails_without_a_neighbour_is_an_error_of_its_own():
    with pytest.raises(ValueError, match="2 values of max_norm"):
        auditing.replay_neighbours(PerSampleClip((1.0, 2.0)), mlp(), LOSS, records())


class SetsByPosition(MiniSetSampler):
    """Set k is rows 3k, 3k+1, 3k+2 of whatever dataset it is given."""

    def draw(self, stream):
        rows, _ = super().draw(stream)
        rows = np.sort(rows)
        return rows, np.arange(len(rows)) // 3


def test_sets_by_position_are_seen():
    planted = partial(SetsByPosition, set_size=3, chosen=4)
    audited = (BatchClip(0.1, 3), mlp(), LOSS, records())
    report = auditing.replay_neighbours(*audited, sampler=planted)
    assert "one record changes which others a step draws, or their mini-sets" in str(report.faults)


def test_a_scheme_for_another_relation_is_refused():
    sampler = partial(FixedSizeSampler, batch_size=8)
    with pytest.raises(tacit.errors.UnsupportedEvent, match="replace-one"):
        auditing.replay_neighbours(PerSampleClip(0.1), mlp(), LOSS, records(), sampler=sampler)
