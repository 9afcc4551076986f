"""What `ghost` says of roundings: of inner products, of sums, and of the norms made from them."""

from __future__ import annotations

import pytest
import torch
from engine_checks import SEEDS
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.queries.engines.ghost import _CASCADE, Gram, ghost_norms, norms_from_grams

UNIT = torch.finfo(torch.float32).eps / 2
TINY = torch.finfo(torch.float32).tiny


def vectors(positions, width):
    """Random, equal and of very different sizes."""
    random = torch.randn(2, positions, width)
    yield random
    yield torch.full_like(random, 0.7)
    yield 0.7 * random.sign()
    yield random * 10 ** (3 * torch.randn_like(random))
    yield 1e-22 * random


@pytest.mark.parametrize("width", [1, 7, 100, 128, 129, 3000, 40000])
def test_inner_products_are_off_by_no_more_than_they_say(width):
    """|fl(x_t·x_u) − x_t·x_u| ≤ depth·u·‖x_t‖‖x_u‖ + width·τ."""
    torch.manual_seed(0)
    for x in vectors(5, width):
        found = Gram.of(x)
        wide = x.double()
        exact = wide @ wide.transpose(1, 2)
        length = wide.norm(dim=2)
        bound = found.depth * UNIT * length[:, :, None] * length[:, None, :] + width * TINY
        assert bool(((found.inner_BTT - exact).abs() <= bound).all())


@pytest.mark.parametrize("positions", [3, 64, 500, 1500])
def test_sums_over_both_positions_round_as_seldom_as_they_say(positions):
    torch.manual_seed(0)
    random = torch.randn(positions, positions)
    for terms in (torch.full_like(random, 0.7), 0.7 * random.sign(), random.exp()):
        error = float((terms.sum(-1).sum(-1) - terms.double().sum()).abs())
        assert error <= _CASCADE * UNIT * float(terms.double().abs().sum())


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.integers(1, 3), max_size=2),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 200), st.integers(1, 200)),
    seed=SEEDS,
)
def test_ready_inner_products_give_the_norm_of_the_sum(groups, sizes, seed):
    positions, before, after = sizes
    torch.manual_seed(seed)
    a = torch.randn(3, *groups, positions, before, dtype=torch.float64)
    b = torch.randn(3, *groups, positions, after, dtype=torch.float64)
    rows = b.transpose(-1, -2) @ a
    expected = rows.flatten(1).square().sum(dim=1)
    reach = (a.norm(dim=-1) * b.norm(dim=-1)).flatten(1).sum(dim=1)
    for found in (ghost_norms(a, b), norms_from_grams(Gram.of(a), Gram.of(b))):
        assert torch.allclose(found[1], reach, rtol=1e-12)
        assert bool((found[0] >= expected * (1 - 1e-13)).all())
        assert bool((found[0] <= expected + 1e-10 * reach.square()).all())
