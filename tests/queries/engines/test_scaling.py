"""A record of scale zero adds nothing, whatever its numbers; on a GPU nobody waits to know."""

from __future__ import annotations

import pytest
import torch
from engine_checks import assert_same, batch_for, sums_of
from torch import nn

from tacit import PerSampleClip
from tacit.queries import BookKeeping, PerRecord
from tacit.queries.engines.convolution import convolution_gradients
from tacit.queries.engines.embedding import embedding_gradients
from tacit.queries.engines.linear import linear_gradients
from tacit.queries.engines.rows import Contracted, Stacked
from tacit.queries.engines.scaling import present, scaled

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
ON_EACH = pytest.mark.parametrize("device", DEVICES)
SCALE = torch.tensor([0.5, 0.0, 2.0, 0.0])
BAD = [torch.nan, torch.inf, -torch.inf]


def spoiled(x: torch.Tensor) -> torch.Tensor:
    """The records of scale zero hold nothing that is finite."""
    x = x.clone()
    x[1], x[3] = torch.nan, torch.inf
    return x


@ON_EACH
@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 7), (3000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaling_leaves_out_what_has_no_scale(device, shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(4, *shape, dtype=dtype)
    column = SCALE.to(dtype).view(4, *(1 for _ in shape))
    for given in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
        bad, scale = spoiled(given).to(device), SCALE.to(device)
        assert torch.equal(scaled(bad, scale).cpu(), x * column)
        assert torch.equal(present(bad, scale).cpu(), x * (column != 0))
        assert bad[1].isnan().all()  # what was given is as it was


def gradients(device):
    torch.manual_seed(0)
    x, b = torch.randn(4, 20, 4, 4), torch.randn(4, 90, 4, 4)
    few, small = nn.Conv2d(20, 1, 3, padding=1), torch.randn(4, 1, 4, 4)
    wide = nn.Conv2d(20, 90, 3, padding=1, padding_mode="circular")
    tokens = torch.tensor([[0, 1], [2, 2], [1, 0], [2, 1]])
    rules = {
        "rows": (convolution_gradients, few, x, small, Stacked),
        "convolution": (convolution_gradients, nn.Conv2d(20, 90, 3, padding=1), x, b, Contracted),
        "circular": (convolution_gradients, wide, x, b, Contracted),
        "linear": (
            linear_gradients,
            nn.Linear(30, 40),
            torch.randn(4, 30),
            torch.randn(4, 40),
            Contracted,
        ),
        "ghost": (
            linear_gradients,
            nn.Linear(90, 80),
            torch.randn(4, 2, 90),
            torch.randn(4, 2, 80),
            Contracted,
        ),
        "embedding": (
            embedding_gradients,
            nn.Embedding(3, 5),
            tokens,
            torch.randn(4, 2, 5),
            Contracted,
        ),
    }
    for name, (rule, layer, x, b, form) in rules.items():
        yield name, rule, layer.to(device), x.to(device), b.to(device), form


@ON_EACH
def test_every_total_is_that_of_the_records_with_a_scale(device):
    for name, rule, layer, x, b, form in gradients(device):
        bad_x = spoiled(x) if x.is_floating_point() else x
        found = rule(layer, {"weight"}, bad_x, spoiled(b))["weight"]
        left = rule(layer, {"weight"}, x[::2], b[::2])["weight"]
        assert isinstance(found, form), name
        scale = SCALE.to(device)
        total, expected = found.total(scale), left.total(scale[::2])
        torch.testing.assert_close(total, expected, rtol=1e-2, atol=1e-2, msg=name)


def test_scaling_by_zero_alone_would_be_caught(monkeypatch):
    """The planted bug: 0 · NaN."""
    from tacit.queries.engines import linear

    monkeypatch.setattr(linear, "scaled", lambda b, s: b * s.view(-1, *(1 for _ in b.shape[1:])))
    monkeypatch.setattr(linear, "present", lambda a, s: a)
    found = linear_gradients(nn.Linear(3, 2), {"weight"}, *spoiled_pair())["weight"]
    assert found.total(SCALE).isnan().any()


def spoiled_pair():
    return spoiled(torch.randn(4, 3)), spoiled(torch.randn(4, 2))


@ON_EACH
@pytest.mark.parametrize("value", BAD)
def test_a_record_that_is_not_finite_changes_nothing_for_the_others(device, value):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.Conv2d(6, 40, 3, stride=2),
        nn.Flatten(),
        nn.Linear(160, 3),
    )
    model = model.double().to(device)
    inputs = torch.randn(5, 2, 6, 6, dtype=torch.float64, device=device)
    others = sums_of(PerSampleClip(0.1, engine=BookKeeping()), model, batch_for(inputs[1:]))
    inputs[0, 0, 2, 3] = value
    batch = batch_for(inputs)
    batch.records.targets[1:] = batch_for(inputs[1:]).targets
    for engine in (BookKeeping(), PerRecord()):
        assert_same(sums_of(PerSampleClip(0.1, engine=engine), model, batch), others)
