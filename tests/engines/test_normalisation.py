"""Rows of a group normalisation's γ against autograd, from what the operator saves.

Layer, RMS and batch normalisation are compared as layers in `test_engine_layers`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tacit.engines.rules import group_norm_rows

EPSILON = 1e-3


def sides(shape, dtype=torch.float64, mean=0.0):
    torch.manual_seed(0)
    return mean + torch.randn(6, *shape, dtype=dtype), torch.randn(6, *shape, dtype=dtype)


def rows_of(x, b, groups):
    count, channels = x.shape[:2]
    _, mean, rstd = torch.ops.aten.native_group_norm(
        x, None, None, count, channels, x[0, 0].numel(), groups, EPSILON
    )
    return group_norm_rows(x, mean, rstd, b, groups)


@pytest.mark.parametrize(
    ("groups", "shape"), [(4, (12, 5, 7)), (2, (8,)), (1, (5, 3)), (3, (3, 2, 3, 4))]
)
def test_group_norm(groups, shape):
    x, b = sides(shape)
    expected = []
    for one, other in zip(x.split(1), b.split(1), strict=True):
        weight = torch.ones(shape[0], dtype=x.dtype, requires_grad=True)
        value = (F.group_norm(one, groups, weight, None, EPSILON) * other).sum()
        expected += torch.autograd.grad(value, [weight])
    torch.testing.assert_close(rows_of(x, b, groups), torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gives_wide_rows(dtype):
    x, b = sides((4, 6), dtype)
    found, exact = rows_of(x, b, 2), rows_of(x.double(), b.double(), 2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0.05, atol=0.05)


def test_a_large_mean_does_not_cancel():
    """Σ x·b − mean·Σ b would lose all digits here."""
    x, b = sides((4, 6), torch.float32, mean=1000.0)
    found, exact = rows_of(x, b, 2), rows_of(x.double(), b.double(), 2)
    assert float((found.double() - exact).norm()) <= 1e-3 * float(exact.norm())


def test_a_trace_serves_other_data():
    x, b = sides((4, 6))
    graph = make_fx(lambda x, b: rows_of(x, b, 2))(x, b)
    torch.testing.assert_close(graph(2 * b, x), rows_of(2 * b, x, 2))


def test_one_record_does_not_reach_another():
    x, b = sides((4, 6))
    spoiled = x.clone()
    spoiled[2] = torch.nan
    others = [0, 1, 3, 4, 5]
    assert torch.equal(rows_of(spoiled, b, 2)[others], rows_of(x, b, 2)[others])
