"""No float32 record adds more than C, however its terms are made to cancel, vanish or round.

A ghost norm is computed from other numbers than those that are added. Records are built here to
make the two disagree as much as they can.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from engine_checks import batch_for
from torch import nn

from tacit import PerSampleClip
from tacit.queries import per_sample_clip
from tacit.queries.engines.embedding import table_gradients
from tacit.queries.engines.linear import outer_products
from tacit.queries.engines.rows import Contracted

SLACK = 1 - 16 * torch.finfo(torch.float32).eps  # what `clip_scale` takes off


def share(gradients, max_norm) -> float:
    """The norm of what one record adds, in units of C."""
    norm = gradients.squares().sqrt()
    if not bool(norm.isfinite()):
        return 0.0  # such a record is left out
    least = torch.finfo(norm.dtype).tiny
    scale = (max_norm * SLACK / norm.clamp_min(least)).clamp(max=1.0)
    return float(gradients.total(scale).double().norm() / max_norm)


def repeated(positions, width, value):
    """Equal numbers: every partial sum is rounded the same way."""
    return torch.full((1, positions, width), value)


def cancelling(positions, width_a, width_b, size, rest):
    """Terms of norm `size` whose sum has a norm of about `rest`."""
    a = torch.randn(1, 1, width_a).expand(1, positions, width_a).clone()
    b = torch.randn(1, positions, width_b)
    b[:, -1] = -b[:, :-1].sum(dim=1)
    return size * a + rest * torch.randn_like(a), b


@pytest.mark.parametrize("width", [(2000, 64), (16384, 64), (65536, 40), (700, 700)])
@pytest.mark.parametrize("positions", [1, 2, 7])
def test_linear_with_equal_numbers(width, positions):
    for a, b in itertools.product([0.1, 1 / 3, 0.7, 1.1], [0.1, 0.7, 3e7]):
        found = outer_products(repeated(positions, width[0], a), repeated(positions, width[1], b))
        assert share(found, 1e-3) <= 1


def test_linear_with_many_positions():
    torch.manual_seed(0)
    for a, b in itertools.product([0.1, 1 / 3, 0.7], [0.1, 1.1]):
        found = outer_products(repeated(200, 900, a), repeated(200, 900, b))
        assert isinstance(found, Contracted)
        assert share(found, 1e-3) <= 1


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6, 1e12])
@pytest.mark.parametrize("rest", [0.0, 1e-6, 1e-3, 1.0])
def test_linear_with_terms_that_cancel(size, rest):
    torch.manual_seed(0)
    for positions in (2, 3, 16):
        for _ in range(5):
            found = outer_products(*cancelling(positions, 300, 400, size, rest))
            assert isinstance(found, Contracted)
            assert share(found, 1e-3) <= 1


@pytest.mark.parametrize("positions", [1, 3])
def test_linear_with_squares_that_vanish_or_overflow(positions):
    """‖b‖² = 0 in float32 for b = 1e-23, but b·a is not nothing when a is 1e18."""
    powers = range(-44, 39, 3)
    for a, b in itertools.product(powers, powers):
        a_BTD, b_BTP = repeated(positions, 50, 10.0**a), repeated(positions, 50, 10.0**b)
        if positions > 1:  # another scale at each position
            a_BTD[:, 1], b_BTP[:, 1] = 10.0**b, 10.0**a
        for max_norm in (1e-9, 1e-3):
            assert share(outer_products(a_BTD, b_BTP), max_norm) <= 1


@pytest.mark.parametrize("size", [1e-22, 1e-3, 1e3, 1e15])
def test_embedding_with_terms_that_cancel_or_round(size):
    torch.manual_seed(0)
    weight = torch.zeros(11, 300)
    for tokens in (torch.zeros(1, 40).long(), torch.randint(0, 11, (1, 40))):
        for b in (
            torch.full((1, 40, 300), 0.7),
            cancelling(40, 1, 300, 1.0, 0.0)[1],
            cancelling(40, 1, 300, 1.0, 0.0)[1] + 1e-5 * torch.randn(1, 40, 300),
        ):
            for max_norm in (1e-12, 1e-3):
                assert share(table_gradients(weight, tokens, size * b), max_norm) <= 1


class ChosenOutputGradient(nn.Module):
    """A layer and a loss ⟨layer(a), b⟩ whose record is (a, b): its gradient can be built."""

    def __init__(self, layer, shape_a) -> None:
        super().__init__()
        self.layer, self.shape_a = layer, shape_a

    def forward(self, record):
        size = torch.Size(self.shape_a).numel()
        a = record[:, :size].reshape(len(record), *self.shape_a)
        return self.layer(a).flatten(1) * record[:, size:]


def the_output(outputs, targets):
    return outputs.sum(dim=1)


def record(a, b):
    return torch.cat([a.flatten(), b.flatten()])


def records_for(layer, shape_a):
    """Random, equal, cancelling and extreme records for a layer."""
    torch.manual_seed(0)
    shape_b = layer(torch.zeros(1, *shape_a)).shape[1:]
    channels_first = isinstance(layer, nn.modules.conv._ConvNd)
    axis = 1 if channels_first else 0
    flat = torch.randn(shape_b)
    balanced = flat - flat.mean(dim=axis, keepdim=True)  # sums to nothing over positions
    constant = torch.ones(shape_a)
    yield record(torch.randn(shape_a), flat)
    for size in (1e-3, 1.0, 1e4, 1e8):
        yield record(size * constant, balanced)
        yield record(size * constant + 1e-4 * torch.randn(shape_a), balanced)
        yield record(0.7 * size * constant, 0.7 * torch.ones(shape_b))


def extreme_records_for(layer, shape_a):
    """Squares vanish on one side and are huge on the other."""
    shape_b = layer(torch.zeros(1, *shape_a)).shape[1:]
    for a, b in [(1e17, 1e-23), (1e-23, 1e17), (1e18, 1e-30)]:
        yield record(torch.full(shape_a, a), torch.full(shape_b, b))


LAYERS = {
    "linear, rows": (nn.Linear(6, 7), (9, 6)),
    "linear, ghost": (nn.Linear(200, 300), (5, 200)),
    "linear, one position": (nn.Linear(2000, 30), (2000,)),
    "conv, few channels": (nn.Conv1d(2, 3, 3), (2, 60)),
    "conv, few positions": (nn.Conv1d(80, 90, 3), (80, 5)),
    "conv2d, few positions": (nn.Conv2d(40, 50, 3), (40, 5, 5)),
    "conv, norms of rows": (nn.Conv1d(30, 40, 9), (30, 60)),
    "transposed, few positions": (nn.ConvTranspose1d(80, 90, 3), (80, 4)),
    "layer norm": (nn.LayerNorm(30), (9, 30)),
}


@pytest.fixture
def unchecked(monkeypatch):
    """No comparison with autograd: of terms that cancel, both keep nothing but roundings."""
    monkeypatch.setattr(per_sample_clip, "check_records", lambda *args: True)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("unchecked")
def test_through_the_query_alone_and_in_a_batch(name):
    layer, shape_a = LAYERS[name]
    model = ChosenOutputGradient(layer, shape_a)
    records = torch.stack(list(records_for(layer, shape_a)))
    for max_norm in (1e-6, 1e-2):
        query = PerSampleClip(max_norm)

        def total(rows, query=query):
            (block,) = query(model, the_output, batch_for(rows)).blocks
            return torch.cat([s.flatten() for s in block.sums]).double()

        others = records[:1].repeat(6, 1)
        before = total(others)
        for i in range(len(records)):
            one = records[i : i + 1]
            assert float(total(one).norm()) <= max_norm, i
            # In a batch the others' share is rounded too, in float32.
            moved = float((total(torch.cat([one, others])) - before).norm())
            assert moved <= max_norm * (1 + 1e-5), i


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("unchecked")
def test_extreme_records_through_the_query(name):
    layer, shape_a = LAYERS[name]
    model = ChosenOutputGradient(layer, shape_a)
    for one in extreme_records_for(layer, shape_a):
        (block,) = PerSampleClip(1e-6)(model, the_output, batch_for(one[None])).blocks
        assert float(torch.cat([s.flatten() for s in block.sums]).norm()) <= 1e-6
