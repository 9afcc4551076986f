"""Ghost norms by the GPU kernel: those of the plain formula, never below the real norm."""

from __future__ import annotations

import pytest
import torch
from test_engine_bound import cancelling, share

from tacit.queries.engines import ghost, ghost_triton
from tacit.queries.engines.ghost import Gram
from tacit.queries.engines.linear import outer_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("positions", [1, 2, 16, 49, 64])
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("size", [1e-22, 1e-3, 1.0, 1e9])
def test_the_kernel_gives_the_plain_formula(positions, shape, size):
    torch.manual_seed(0)
    a = Gram.of(size * torch.randn(*shape, positions, 40, device="cuda"))
    b = Gram.of(torch.randn(*shape, positions, 30, device="cuda"))
    assert ghost_triton.fits(a.inner_BTT)
    found = ghost_triton.norms(a.inner_BTT, b.inner_BTT, (a.width, b.width), 500)
    for mine, plain in zip(found, ghost._norms(a, b, 500), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_found_out(value):
    a, b = torch.randn(2, 3, 4, device="cuda"), torch.randn(2, 3, 5, device="cuda")
    a[0, 1, 2] = value
    norms, _ = ghost.ghost_norms(a, b)
    assert norms.isfinite().tolist() == [False, True]


@pytest.mark.parametrize("positions", [2, 7, 64])
def test_terms_that_cancel_keep_the_bound(positions):
    torch.manual_seed(0)
    for size in (1e-3, 1.0, 1e3, 1e8):
        for rest in (0.0, 1e-6, 1e-3, 1.0):
            a, b = cancelling(positions, 300, 400, size, rest)
            assert share(outer_products(a.cuda(), b.cuda()), 1e-3) <= 1


def test_many_positions_go_by_the_plain_formula():
    assert not ghost_triton.fits(torch.ones(1, 65, 65, device="cuda"))
    assert not ghost_triton.fits(torch.ones(1, 8, 8, device="cuda", dtype=torch.float64))
    assert not ghost_triton.fits(torch.ones(1, 8, 8))
