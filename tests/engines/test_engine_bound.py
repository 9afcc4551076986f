"""No float32 record adds more than C through a query, however its terms cancel, vanish or round.

A ghost norm is computed from other numbers than those that are added. Records are built here to
make the two disagree as much as they can; `test_products` and `test_convolution` ask the kernels.
"""

from __future__ import annotations

import pytest
import torch
from engine_checks import batch_for
from torch import nn

from tacit import PerSampleClip
from tacit.queries import per_sample_clip


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
    monkeypatch.setattr(per_sample_clip, "check_model", lambda *args, **kwargs: True)


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
