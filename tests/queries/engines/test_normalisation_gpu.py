"""GroupNorm's gradients by the GPU kernel are those of the plain rule in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tacit.queries.engines import normalisation, normalisation_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOTH = {"weight", "bias"}
SHAPES = [
    (4, (12, 5, 7)),
    (16, (16, 32, 32)),
    (16, (64, 32, 32)),
    (2, (8,)),
    (1, (5, 3)),
    (3, (3, 2, 3, 4)),
]


@pytest.mark.parametrize(("groups", "shape"), SHAPES)
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_the_kernel_gives_the_plain_rule(groups, shape, mean):
    torch.manual_seed(0)
    x, b = mean + torch.randn(5, *shape), torch.randn(5, *shape)
    x[1] = mean  # nothing but ε under the root
    layer = nn.GroupNorm(groups, shape[0], eps=1e-3)
    assert normalisation_triton.fits(x.cuda(), groups)
    found = normalisation.group_norm_gradients(layer, BOTH, x.cuda(), b.cuda())
    exact = normalisation.group_norm_gradients(layer, BOTH, x.double(), b.double())
    for name in BOTH:
        expected = exact[name].rows()
        error = (found[name].rows().cpu().double() - expected).norm()
        assert float(error) <= 1e-5 * (1 + mean) * float(expected.norm())


def test_a_group_too_large_goes_by_the_plain_rule():
    layer, x = nn.GroupNorm(1, 8).cuda(), torch.randn(2, 8, 64, 64, device="cuda")
    assert not normalisation_triton.fits(x, 1)
    rows = normalisation.group_norm_gradients(layer, {"bias"}, x, x)["bias"].rows()
    torch.testing.assert_close(rows, x.flatten(2).sum(dim=2))


def test_the_kernel_is_for_float32_alone():
    x = torch.randn(2, 4, 3, device="cuda")
    assert normalisation_triton.fits(x, 2)
    assert not normalisation_triton.fits(x.double(), 2)
    assert not normalisation_triton.fits(x.cpu(), 2)
