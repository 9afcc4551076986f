"""One record among thousands of identical ones moves a clipped sum by at most the constant."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tacit import BatchClip, PerSampleClip
from tacit.budget import Relation
from tacit.engines import Automatic, BookKeeping, Clipped
from tacit.queries.set_gradients import SetsAsRecords, added_up
from tacit.sampling import Poisson, batch_of

torch.set_num_threads(1)

QUERIES = {
    "book-keeping": lambda: PerSampleClip(0.1, engine=BookKeeping()),
    "automatic": lambda: PerSampleClip(0.1, engine=Automatic()),
    "sets as records": lambda: BatchClip(0.1, 1, engine=SetsAsRecords()),
}
ARITHMETIC = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast": (torch.float32, torch.bfloat16),
    "float32": (torch.float32, None),
    "float64": (torch.float64, None),
}


@pytest.fixture(autouse=True)
def plain_kernels():
    """oneDNN's bfloat16 kernels stop the process on virtual machines that hide AMX."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(dim=(2, 3))


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(6, 3))
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), Mean())


def ratio(query, model, same, count: int, label: int, one, cast) -> float:
    """Movement over sensitivity when `one` is added to `count` records `same`."""
    found = []
    for last in ([], [one]):
        x = torch.cat([same.expand(count, *same.shape), *(o[None] for o in last)])
        y = torch.tensor([0] * count + [label] * len(last))
        batch = batch_of(x, y, divisor=64.0, scheme=Poisson(0.5))
        with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
            found.append(query(model, nn.CrossEntropyLoss(), batch))
    (sensitivity,) = found[0].sensitivities(Relation.ADD_OR_REMOVE_ONE)
    pairs = zip(found[0].blocks[0].sums, found[1].blocks[0].sums, strict=True)
    return math.sqrt(sum(float((a - b).double().square().sum()) for a, b in pairs)) / sensitivity


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("name", QUERIES)
def test_one_record_added(name, arithmetic, kind):
    dtype, cast = ARITHMETIC[arithmetic]
    model = network(kind).to(dtype)
    same = (torch.rand((6,) if kind == "linear" else (2, 4, 4)) + 0.5).to(dtype)
    count = 8192 if kind == "linear" else 4096
    found = ratio(QUERIES[name](), model, same, count, 0, same, cast)
    assert 0.98 <= found <= 1


def test_sets_one_after_the_other_are_added_in_float64():
    """Each of thousands of float32 additions would be rounded in the same direction."""
    parts = [Clipped({"w": torch.full((1,), 1 + 2.0**-23)})] * 5000
    assert float(added_up(parts).sums["w"]) == 5000 * (1 + 2.0**-23)
