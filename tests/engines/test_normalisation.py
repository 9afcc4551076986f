"""Rows of γ and β against autograd, record by record, from what the operators save."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tacit.engines.normalisation import (
    batch_norm_rows,
    group_norm_rows,
    layer_norm_rows,
    rms_norm_rows,
)

aten = torch.ops.aten
EPSILON = 1e-3


def rows_by_autograd(function, x, b, shape, rows):
    """∂/∂γ and ∂/∂β of each record, of `function(x, γ, β)`."""
    found = []
    for one, other in zip(x.split(rows), b.split(rows), strict=True):
        weight = torch.ones(shape, dtype=x.dtype, requires_grad=True)
        bias = torch.zeros(shape, dtype=x.dtype, requires_grad=True)
        value = (function(one, weight, bias) * other).sum()
        found.append(torch.autograd.grad(value, [weight, bias], allow_unused=True))
    columns = zip(*found, strict=True)
    return [None if column[0] is None else torch.stack(column) for column in columns]


def sides(shape, dtype=torch.float64, mean=0.0):
    torch.manual_seed(0)
    return mean + torch.randn(6, *shape, dtype=dtype), torch.randn(6, *shape, dtype=dtype)


def layer(x, b, shape, rows=1):
    _, mean, rstd = aten.native_layer_norm(x, shape, None, None, EPSILON)
    return layer_norm_rows(x, mean, rstd, b, shape, rows)


def group(x, b, groups, rows=1):
    count, channels = x.shape[:2]
    size = x[0, 0].numel()
    _, mean, rstd = aten.native_group_norm(x, None, None, count, channels, size, groups, EPSILON)
    return group_norm_rows(x, mean, rstd, b, groups, rows)


def rms(x, b, shape, rows=1):
    dims = tuple(range(-len(shape), 0))
    rstd = torch.rsqrt(x.square().mean(dim=dims, keepdim=True) + EPSILON)
    return (rms_norm_rows(x, rstd, b, shape, rows),)


def batch(x, b, rows=1):
    mean = torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)
    return batch_norm_rows(x, mean, 1 + mean.square(), EPSILON, b, rows)


EACH_ROWS = pytest.mark.parametrize("rows", [1, 2, 3])


@EACH_ROWS
@pytest.mark.parametrize(("shape", "dims"), [((7,), 1), ((4, 7), 1), ((3, 4, 7), 2)])
def test_layer_norm(shape, dims, rows):
    x, b = sides(shape)
    normalized = shape[-dims:]
    expected = rows_by_autograd(
        lambda x, w, c: F.layer_norm(x, normalized, w, c, EPSILON), x, b, normalized, rows
    )
    for mine, exact in zip(layer(x, b, normalized, rows), expected, strict=True):
        torch.testing.assert_close(mine, exact)


@EACH_ROWS
@pytest.mark.parametrize(("shape", "dims"), [((7,), 1), ((4, 7), 1), ((3, 4, 7), 2)])
def test_rms_norm(shape, dims, rows):
    x, b = sides(shape)
    normalized = shape[-dims:]
    expected, _ = rows_by_autograd(
        lambda x, w, c: F.rms_norm(x, normalized, w, EPSILON), x, b, normalized, rows
    )
    torch.testing.assert_close(rms(x, b, normalized, rows)[0], expected)


@EACH_ROWS
@pytest.mark.parametrize(
    ("groups", "shape"), [(4, (12, 5, 7)), (2, (8,)), (1, (5, 3)), (3, (3, 2, 3, 4))]
)
def test_group_norm(groups, shape, rows):
    x, b = sides(shape)
    expected = rows_by_autograd(
        lambda x, w, c: F.group_norm(x, groups, w, c, EPSILON), x, b, shape[:1], rows
    )
    for mine, exact in zip(group(x, b, groups, rows), expected, strict=True):
        torch.testing.assert_close(mine, exact)


@EACH_ROWS
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 2)])
def test_batch_norm_in_evaluation_mode(shape, rows):
    x, b = sides(shape)
    mean = torch.linspace(-1, 1, 5, dtype=x.dtype)
    expected = rows_by_autograd(
        lambda x, w, c: F.batch_norm(x, mean, 1 + mean.square(), w, c, eps=EPSILON),
        x,
        b,
        (5,),
        rows,
    )
    for mine, exact in zip(batch(x, b, rows), expected, strict=True):
        torch.testing.assert_close(mine, exact)


def test_the_rms_operator_saves_what_the_rule_takes():
    x, b = sides((4, 7), torch.float32)
    _, rstd = aten._fused_rms_norm(x, (7,), None, EPSILON)
    torch.testing.assert_close(rms_norm_rows(x, rstd, b, (7,)), rms(x, b, (7,))[0])


KINDS = {
    "layer": ((4, 6), lambda x, b: layer(x, b, (6,))),
    "rms": ((4, 6), lambda x, b: rms(x, b, (6,))),
    "group": ((4, 6), lambda x, b: group(x, b, 2)),
    "batch": ((4, 6), lambda x, b: batch(x, b)),
}
EACH_KIND = pytest.mark.parametrize("name", KINDS)


@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gives_wide_rows(name, dtype):
    shape, rule = KINDS[name]
    x, b = sides(shape, dtype)
    for mine, exact in zip(rule(x, b), rule(x.double(), b.double()), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), exact, rtol=0.05, atol=0.05)


@EACH_KIND
def test_a_large_mean_does_not_cancel(name):
    """Σ x·b − mean·Σ b would lose all digits here."""
    shape, rule = KINDS[name]
    if name in ("rms", "batch"):
        return  # no mean of the record's own
    x, b = sides(shape, torch.float32, mean=1000.0)
    for mine, exact in zip(rule(x, b), rule(x.double(), b.double()), strict=True):
        assert float((mine.double() - exact).norm()) <= 1e-3 * float(exact.norm())


@EACH_KIND
def test_a_trace_serves_other_data(name):
    shape, rule = KINDS[name]
    x, b = sides(shape)
    graph = make_fx(rule)(x, b)
    for mine, eager in zip(graph(2 * b, x), rule(2 * b, x), strict=True):
        torch.testing.assert_close(mine, eager)


@EACH_KIND
def test_one_record_does_not_reach_another(name):
    shape, rule = KINDS[name]
    x, b = sides(shape)
    spoiled = x.clone()
    spoiled[2] = torch.nan
    for mine, clean in zip(rule(spoiled, b), rule(x, b), strict=True):
        assert torch.equal(mine[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])
