"""Norms of convolution gradients on a GPU: by the kernel, by pixels and by windows."""

from __future__ import annotations

import copy

import pytest
import torch
from test_convolution_norms import LAYERS, gradients, norms_by, sides, squares_by_autograd
from test_engine_bound import share
from torch import nn

from tacit.queries.engines import convolution, convolution_triton
from tacit.queries.engines.convolution_cost import Way
from tacit.queries.engines.convolution_triton import Tiles
from tacit.queries.engines.rows import Stacked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", LAYERS)
def test_every_way_gives_the_norm_of_a_convolution(name):
    layer, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = copy.deepcopy(layer).double()
    x, b = sides(layer, shape, 3, torch.float64)
    expected = squares_by_autograd(layer, x, b)
    kernel = convolution._Kernel(layer.cuda(), x.cuda(), b.cuda())
    for way in Way:
        norms, reach = (t.cpu() for t in norms_by(way, kernel))
        assert bool((norms >= expected * (1 - 1e-13)).all())
        assert bool((norms <= expected + 1e-10 * reach.square()).all())


@pytest.mark.parametrize("tensor_float", [False, True])
@pytest.mark.parametrize("way", Way, ids=lambda way: way.name)
@pytest.mark.parametrize("name", LAYERS)
def test_a_convolution_keeps_the_bound(name, way, tensor_float, monkeypatch):
    """Where terms cancel, and where all are rounded alike."""
    layer, shape = LAYERS[name]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tensor_float)
    torch.manual_seed(0)
    noise, b = sides(layer, shape)
    balanced = b - b.flatten(2).mean(dim=2).view(1, -1, *(1 for _ in b.shape[2:]))
    layer = copy.deepcopy(layer).cuda()
    for size in (1e-3, 1.0, 1e4, 1e8):
        constant = torch.full_like(noise, size)
        for one, other in (
            (constant, balanced),
            (constant + 1e-4 * noise, balanced),
            (0.7 * constant, torch.full_like(b, 0.7)),
            (noise, b),
        ):
            found = gradients(layer, one.cuda(), other.cuda(), way, monkeypatch)
            for max_norm in (1e-6, 1e-2):
                assert share(found, max_norm) <= 1


@pytest.mark.parametrize("benchmark", [False, True])
@pytest.mark.parametrize("way", Way, ids=lambda way: way.name)
def test_sides_that_never_meet_add_nothing(way, benchmark, monkeypatch):
    """A Fourier transform leaves roundings of ‖a‖·‖b‖ where the gradient is zero."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    torch.manual_seed(0)
    layer = nn.Conv2d(128, 256, 3, padding=1)
    for side in (8, 16):
        x, b = (t.cuda() for t in sides(layer, (128, side, side)))
        x[:, :, 2:], b[:, :, :4] = 0, 0
        for size in (1e2, 1e4, 1e6):
            found = gradients(copy.deepcopy(layer).cuda(), size * x, size * b, way, monkeypatch)
            assert share(found, 1e-3) <= 1


ZERO_PADDED = [
    (nn.Conv2d(40, 70, 3, padding=1), (40, 9, 7)),
    (nn.Conv2d(3, 16, 3, padding=1), (3, 8, 8)),
    (nn.Conv2d(33, 20, (2, 3), stride=2, padding=(0, 2)), (33, 8, 9)),
    (nn.Conv2d(64, 32, 3, dilation=2), (64, 7, 8)),
    (nn.Conv2d(16, 130, 1, stride=2), (16, 5, 6)),
    (nn.Conv1d(35, 5, 3, padding=2), (35, 9)),
]


@pytest.mark.parametrize(("layer", "shape"), ZERO_PADDED, ids=str)
@pytest.mark.parametrize("over_places", [False, True])
def test_every_tiling_of_the_kernels_gives_the_rows(layer, shape, over_places, monkeypatch):
    """Tiles that end outside of filters, channels and positions, and the choice for the shape."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    double = copy.deepcopy(layer).double()
    x, b = sides(double, shape, 3, torch.float64)
    rows = [
        torch.autograd.grad((double(one[None]) * other).sum(), double.weight)[0]
        for one, other in zip(x, b, strict=True)
    ]
    expected = torch.stack(rows)
    gpu, x, b = copy.deepcopy(layer).cuda(), x.float().cuda(), b.float().cuda()
    for tiles in (None, Tiles(32, 32, 64 if over_places else 32, 4, 2, over_places)):
        found, squares = convolution_triton.weight_gradients(gpu, x, b, store=True, tiles=tiles)
        _, alone = convolution_triton.weight_gradients(gpu, x, b, store=False, tiles=tiles)
        assert found is not None
        torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(squares, found.flatten(1).square().sum(dim=1))
        torch.testing.assert_close(alone, squares)
        kept, scale = Stacked(found, squares), torch.rand(3, device="cuda")
        total = torch.einsum("b,b...->...", scale, found)
        torch.testing.assert_close(kept.total(scale), total)
