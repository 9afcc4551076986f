"""The search finds records that no sample has, and says how tight bounds are."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from setups import LOSS, PlainClip, lipschitz_mlp, mlp, records
from torch import nn

from tacit import BatchClip, Clipless, PerSampleClip, Records, Relation, auditing

QUICK = {"steps": 12, "restarts": 1, "tries": 12}


@pytest.mark.parametrize("relation", Relation)
def test_clipped_routes_reach_their_bound_and_no_more(relation):
    for query in (PerSampleClip(0.1), BatchClip(0.1, 2)):
        worst = auditing.find_worst_record(
            query, mlp(), LOSS, records(), relation=relation, **QUICK
        ).require()
        assert worst.largest > 0.7
        assert len(worst.record) == (2 if relation is Relation.REPLACE_ONE else 1)


@functools.cache
def worst_of_a_lipschitz_network():
    model = lipschitz_mlp()
    before = [p.detach().clone() for p in model.parameters()]
    worst = auditing.find_worst_record(Clipless(), model, LOSS, records(), **QUICK)
    assert all(map(torch.equal, before, model.parameters()))  # the model is not changed
    assert next(model.parameters()).dtype is torch.float32
    return worst


def test_the_bounds_of_a_lipschitz_network_are_nearly_reached():
    worst = worst_of_a_lipschitz_network()
    assert worst.holds
    assert 0.7 < worst.largest <= 1
    assert set(worst.ratios) == {"1.weight", "1.bias", "3.weight"}


def test_the_record_that_is_returned_reaches_the_ratio():
    model, query, worst = lipschitz_mlp().double(), Clipless(), worst_of_a_lipschitz_network()
    model.load_state_dict(worst.weights, strict=False)
    alone = auditing.replay_neighbours(query, model, LOSS, worst.record, candidates=worst.record)
    assert alone.largest == pytest.approx(worst.largest, rel=1e-6)


class StepsOver(PlainClip):
    """Forgets to clip where an input is above 4 in size: no record of the sample is."""

    def gradients(self, model, loss, parameters, batch):
        rows = super().gradients(model, loss, parameters, batch)
        self.far = (batch.inputs.abs() > 4).any(dim=1)
        return rows

    def clipped(self, rows):
        return torch.where(self.far[: len(rows), None], rows, super().clipped(rows))


def test_a_bug_far_from_the_sample_is_found():
    worst = auditing.find_worst_record(StepsOver(), mlp(), LOSS, records(), **QUICK)
    assert not worst.holds
    assert worst.record.inputs.abs().max() > 4


class OneLabel(PerSampleClip):
    """Clips at ten times the bound if all tokens of a record are 3."""

    def __call__(self, model, loss, batch):
        known = bool((batch.inputs == 3).all(dim=1).any())
        found = PerSampleClip(1.0 if known else 0.1)(model, loss, batch)
        return replace(found, blocks=tuple(replace(b, bound=0.1002) for b in found.blocks))


def test_tokens_are_searched_without_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(6, 2))
    tokens = torch.randint(0, 4, (12, 2))
    tokens[tokens.eq(3).all(dim=1)] = 0
    some = Records(tokens, torch.arange(12) % 2, num_classes=2)
    honest = auditing.find_worst_record(PerSampleClip(0.1), model, LOSS, some, **QUICK)
    assert honest.holds
    planted = auditing.find_worst_record(OneLabel(0.1), model, LOSS, some, restarts=0, tries=60)
    assert not planted.holds
    assert (planted.record.inputs == 3).all()
