"""What every form of per-record gradients promises, checked against explicit rows."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tacit.engines.clipping import RowScale
from tacit.engines.products import Dense, Lookup, matrix_gradients

UNIT = torch.finfo(torch.float32).eps / 2
TINY = torch.finfo(torch.float32).tiny
SLACK = 1 - 16 * torch.finfo(torch.float32).eps  # what clipping takes off


def outer_products(a_BTD, b_BTP):
    return matrix_gradients([Dense(a_BTD, b_BTP)])


def table_gradients(num_rows, tokens_BT, b_BTD):
    return matrix_gradients([Lookup(num_rows, tokens_BT, b_BTD)])


def share(gradients, max_norm) -> float:
    """The norm of what one record adds, in units of C."""
    norm = gradients.squares().sqrt()
    if not bool(norm.isfinite()):
        return 0.0  # such a record is left out
    least = torch.finfo(norm.dtype).tiny
    scale = (max_norm * SLACK / norm.clamp_min(least)).clamp(max=1.0)
    return float(gradients.total(RowScale(scale)).double().norm() / max_norm)


def check_exact(found, rows_BP, slack=1e-9):
    """Float64: rows, totals, and norms from above that are no more than `slack` too large."""
    assert found.rows().shape == rows_BP.shape
    torch.testing.assert_close(found.rows(), rows_BP, rtol=1e-10, atol=1e-10)
    scale = torch.rand(len(rows_BP), dtype=rows_BP.dtype)
    total = torch.einsum("b,b...->...", scale, rows_BP)
    torch.testing.assert_close(found.total(RowScale(scale)), total, rtol=1e-9, atol=1e-9)
    expected = rows_BP.reshape(len(rows_BP), -1).square().sum(dim=1)
    squares = found.squares()
    assert bool((squares >= expected * (1 - 1e-13)).all())
    assert bool((squares <= expected * (1 + slack) + slack).all())


def check_left_out(make, *arguments):
    """Records of scale zero may hold anything: the total is that of the others."""
    scale = torch.tensor([0.5, 0.0, 2.0, 0.0])
    bad = [x.clone() for x in arguments]
    for x in bad:
        if x.is_floating_point():
            x[1], x[3] = torch.nan, torch.inf
    spoiled, others = make(*bad), make(*(x[::2] for x in arguments))
    torch.testing.assert_close(
        spoiled.total(RowScale(scale)), others.total(RowScale(scale[::2])), rtol=1e-4, atol=1e-4
    )
    assert spoiled.squares().isfinite().tolist() == [True, False, True, False]


def check_traceable(make, first, second):
    """A trace on one batch gives the eager numbers of another batch, with records left out."""

    def step(scale_B, *arguments):
        found = make(*arguments)
        return found.squares(), found.total(RowScale(scale_B)), found.rows()

    graph = make_fx(step)(torch.ones(len(first[0])), *first)
    scale = torch.linspace(0, 1, len(first[0]))
    for mine, eager in zip(graph(scale, *second), step(scale, *second), strict=True):
        torch.testing.assert_close(mine, eager)
    return graph
