"""Draws repeat with the same seed, and only then: not without one, and not in a forked child."""

from __future__ import annotations

import pytest
import torch
from forked import Forked

from tacit import FixedSizeSampler, MiniSetSampler, PoissonSampler, Records, ShuffleSampler

DATA = Records(torch.zeros(400, 1), torch.zeros(400), public_size=400)

SAMPLERS = {
    "poisson": lambda **kw: PoissonSampler(DATA, 0.5, **kw),
    "poisson-gaps": lambda **kw: PoissonSampler(DATA, 0.1, **kw),
    "fixed-size": lambda **kw: FixedSizeSampler(DATA, 100, **kw),
    "mini-sets-chosen": lambda **kw: MiniSetSampler(DATA, 4, chosen=20, **kw),
    "mini-sets-rate": lambda **kw: MiniSetSampler(DATA, 4, rate=0.3, **kw),
    "shuffle": lambda **kw: ShuffleSampler(DATA, 50, **kw),
}


def drawn(sampler, steps=3) -> list[list[int]]:
    return [sampler.next_batch().indices.tolist() for _ in range(steps)]


@pytest.fixture(params=SAMPLERS.values(), ids=SAMPLERS.keys())
def make(request):
    return request.param


def test_one_seed_one_sequence(make):
    assert drawn(make(seed=7)) == drawn(make(seed=7))


def test_another_seed_another_sequence(make):
    assert drawn(make(seed=7)) != drawn(make(seed=8))


def test_no_seed_never_the_same_sequence(make):
    torch.manual_seed(0)
    one = drawn(make())
    torch.manual_seed(0)
    assert one != drawn(make())


def test_the_partition_into_sets_is_public_and_does_not_follow_the_seed():
    one = MiniSetSampler(DATA, 4, chosen=20, seed=1).set_of_row
    other = MiniSetSampler(DATA, 4, chosen=20, seed=2).set_of_row
    assert (one == other).all()


def test_a_forked_child_does_not_repeat_its_parents_draws(make):
    """Steps that share one batch are not the independent samplings that are accounted for."""
    sampler = make()
    drawn(sampler, steps=1)
    how, in_child = Forked(lambda: drawn(sampler, steps=1)).result()
    assert how == "done"
    assert in_child != drawn(sampler, steps=1)
