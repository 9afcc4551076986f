"""Norms of convolution gradients by every way: right in float64, never too small in float32."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from engine_checks import SEEDS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_bound import share
from test_engine_layers import convolutions
from torch import nn

from tacit.queries.engines import convolution
from tacit.queries.engines.convolution_cost import Way, cheapest
from tacit.queries.engines.convolution_gram import Axis, num_additions, window_gram
from tacit.queries.engines.rows import Contracted, Stacked, pieces

UNIT = torch.finfo(torch.float32).eps / 2
TINY = torch.finfo(torch.float32).tiny
GHOSTS = [Way.PIXELS, Way.WINDOWS]


def norms_by(way, kernel):
    return kernel._norms_of_rows() if way is Way.ROWS else kernel._ghost_norms(way)


def gradients(layer, x, b, way, monkeypatch) -> Contracted:
    """The weight's gradients with norms taken in one way, whatever the cost."""
    monkeypatch.setattr(convolution, "cheapest", lambda *_, **__: way)
    found = convolution.convolution_gradients(layer, {"weight"}, x, b)["weight"]
    assert isinstance(found, Contracted)
    return found


def sides(layer, shape, count=1, dtype=torch.float32):
    """A random input and output gradient."""
    x = torch.randn(count, *shape, dtype=dtype)
    with torch.no_grad():
        return x, torch.randn_like(layer(x))


def squares_by_autograd(layer, x, b) -> torch.Tensor:
    found = []
    for one, gradient in zip(x, b, strict=True):
        value = (layer(one[None]) * gradient).sum()
        (row,) = torch.autograd.grad(value, layer.weight)
        found.append(row.square().sum())
    return torch.stack(found)


@pytest.mark.parametrize("transposed", [False, True])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), count=st.integers(1, 3), seed=SEEDS)
def test_every_way_gives_the_norm_of_autograd(transposed, data, count, seed):
    kind, channels, options, shape = data.draw(convolutions(transposed))
    torch.manual_seed(seed)
    layer = kind(*channels, **options).double()
    x, b = sides(layer, shape, count, torch.float64)
    expected = squares_by_autograd(layer, x, b)
    kernel = convolution._Kernel(layer, x, b)
    for way in Way:
        norms, reach = norms_by(way, kernel)
        assert bool((norms >= expected * (1 - 1e-13)).all())
        assert bool((norms <= expected + 1e-10 * reach.square() + 1e-200).all())


@pytest.mark.parametrize("way", Way)
def test_norms_do_not_depend_on_the_pieces(way, monkeypatch):
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 8, 3, padding=1, groups=2)
    kernel = convolution._Kernel(layer, *sides(layer, (6, 5, 4), 7))
    together = norms_by(way, kernel)
    monkeypatch.setattr(
        convolution, "pieces", lambda count, each, limit: pieces(count, each, 3 * each)
    )
    for whole, cut in zip(together, norms_by(way, kernel), strict=True):
        assert torch.allclose(whole, cut, rtol=1e-6)


LAYERS = {
    "conv1d": (nn.Conv1d(40, 50, 3, padding=1), (40, 5)),
    "conv1d, dilated": (nn.Conv1d(30, 40, 5, dilation=2, padding_mode="reflect"), (30, 12)),
    "conv2d": (nn.Conv2d(20, 40, 3, padding=1), (20, 4, 4)),
    "conv2d, wide": (nn.Conv2d(300, 10, 3, padding=1), (300, 4, 3)),
    "conv2d, stride": (nn.Conv2d(20, 40, 3, stride=2, padding=1), (20, 6, 5)),
    "conv2d, groups": (nn.Conv2d(40, 48, 3, padding=1, groups=2), (40, 4, 4)),
    "conv2d, circular": (nn.Conv2d(20, 40, 3, padding=2, padding_mode="circular"), (20, 4, 3)),
    "conv2d, large window": (nn.Conv2d(8, 40, 9, padding=4), (8, 6, 6)),
    "conv3d": (nn.Conv3d(10, 14, 3, padding=1), (10, 3, 2, 3)),
    "transposed1d": (nn.ConvTranspose1d(40, 50, 3, stride=2), (40, 4)),
    "transposed2d": (nn.ConvTranspose2d(40, 30, 3, padding=1, output_padding=0), (40, 4, 3)),
    "transposed3d": (nn.ConvTranspose3d(20, 16, 2), (20, 2, 2, 2)),
}
EACH_LAYER = pytest.mark.parametrize("name", LAYERS)
EACH_GHOST = pytest.mark.parametrize("way", GHOSTS, ids=lambda way: way.name)


@EACH_LAYER
@EACH_GHOST
def test_terms_that_cancel_keep_the_bound(name, way, monkeypatch):
    """A constant input meets output gradients that sum to nothing, or to nearly nothing."""
    layer, shape = LAYERS[name]
    torch.manual_seed(0)
    noise, b = sides(layer, shape)
    over = tuple(range(2, b.dim()))
    balanced = b - b.mean(dim=over, keepdim=True)
    for size, rest in itertools.product([1e-3, 1.0, 1e3, 1e8], [0.0, 1e-6, 1e-3, 1.0]):
        x = size * torch.randn(1, shape[0], *(1 for _ in over)).expand(1, *shape) + rest * noise
        for cotangent in (balanced, balanced + rest * b):
            found = gradients(layer, x, cotangent, way, monkeypatch)
            for max_norm in (1e-6, 1e-3):
                assert share(found, max_norm) <= 1


@EACH_LAYER
@EACH_GHOST
def test_the_norm_is_not_below_the_real_one(name, way, monkeypatch):
    """Against float64, where all partial sums are rounded the same way or cancel."""
    layer, shape = LAYERS[name]
    double = copy.deepcopy(layer).double()
    torch.manual_seed(0)
    _, random = sides(layer, shape)
    balanced = random - random.flatten(2).mean(dim=2).view(1, -1, *(1 for _ in random.shape[2:]))
    for value, b in itertools.product(
        [0.1, 1 / 3, 0.7, 1.1, 1e6], [torch.full_like(random, 0.7), balanced, random]
    ):
        x = torch.full((1, *shape), value)
        found = gradients(layer, x, b, way, monkeypatch)
        real = float(squares_by_autograd(double, x.double(), b.double()).sqrt())
        assert float(found.squares().sqrt()) >= real * (1 - 4 * UNIT)


@EACH_LAYER
@EACH_GHOST
def test_values_whose_products_vanish_or_overflow_keep_the_bound(name, way, monkeypatch):
    """‖b‖² = 0 in float32 for b = 1e-23, but b·a is not nothing when a is 1e18."""
    layer, shape = LAYERS[name]
    torch.manual_seed(0)
    noise, random = sides(layer, shape)
    for power_a, power_b in itertools.product(range(-44, 39, 6), repeat=2):
        x, b = torch.full((1, *shape), 10.0**power_a), torch.full_like(random, 10.0**power_b)
        x[0, :, ..., 0] = 10.0**power_b  # another scale at the first pixels
        for sign_a, sign_b in ((1.0, 1.0), (noise.sign(), random.sign())):
            found = gradients(layer, x * sign_a, b * sign_b, way, monkeypatch)
            for max_norm in (1e-9, 1e-3):
                assert share(found, max_norm) <= 1


@EACH_LAYER
@pytest.mark.parametrize("size", [1e-22, 1e-3, 1.0, 1e3])
def test_inner_products_of_windows_are_off_by_no_more_than_they_say(name, size):
    """|fl(a_t·a_u) − a_t·a_u| ≤ depth·u·‖a_t‖‖a_u‖ + width·τ, entry by entry."""
    layer, shape = LAYERS[name]
    torch.manual_seed(0)
    x, b = sides(layer, shape, 2)
    for made in (x, torch.full_like(x, 0.7), x.sign() * 0.7, x * 10 ** (3 * torch.randn_like(x))):
        kernel = convolution._Kernel(layer, size * made, b)
        if kernel.transposed:  # the windows are those of the output gradient
            kernel = convolution._Kernel(layer, x, size * b)
        everyone = slice(None)
        gram = window_gram(kernel._padded(everyone), layer.groups, kernel.axes)
        windows = kernel._windows(everyone).double()
        exact = windows @ windows.transpose(2, 3)
        length = exact.diagonal(dim1=2, dim2=3).sqrt()
        bound = length[..., :, None] * length[..., None, :] * gram.depth * UNIT
        assert gram.width == kernel.window
        assert bool(((gram.inner_BTT - exact).abs() <= bound + gram.width * TINY).all())


def test_small_maps_are_done_by_pixels_and_large_ones_by_rows():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")

    def way(channels, side, device, fused, groups=1):
        axes = [Axis(count=side, kernel=3, stride=1, dilation=1)] * 2
        return cheapest(axes, channels, channels, groups, device=device, fused=fused)

    for device, fused in ((cpu, False), (gpu, False), (gpu, True)):
        assert way(256, 8, device, fused) is Way.PIXELS
        assert way(512, 4, device, fused) is Way.PIXELS
        assert way(32, 64, device, fused) is Way.ROWS
        # Cheaper by pixels, and too large: 10⁸ inner products in one record.
        assert way(9000, 100, device, fused) is Way.ROWS
        assert way(256, 8, device, fused, groups=100_000) is Way.ROWS


def test_additions_are_counted():
    """3×3 on 8×8, padded to 10×10: twice 10²·8² along one axis and twice 8²·8² along the other."""
    axis = Axis(count=8, kernel=3, stride=1, dilation=1)
    assert axis.span == 10
    assert num_additions([axis, axis]) == 2 * 10**2 * 8**2 + 2 * 8**4
    assert num_additions([Axis(5, 1, 2, 1)]) == 0


@EACH_LAYER
def test_a_gpu_counts_on_the_whole_of_both_sides(name):
    """‖a‖·‖b‖, which a Fourier transform's roundings are a small part of."""
    layer, shape = LAYERS[name]
    torch.manual_seed(0)
    kernel = convolution._Kernel(layer, *sides(layer, shape, 3))
    padded = kernel._padded(slice(None)).flatten(1).norm(dim=1)
    expected = padded * kernel.plain.flatten(1).norm(dim=1)
    assert torch.allclose(kernel._whole_reach(), expected, rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), seed=SEEDS)
def test_two_lengths_and_the_overlap_bound_the_reach(data, seed):
    """Σ_t ‖a_t‖‖b_t‖ ≤ √n·‖a‖·‖b‖ with n windows over a pixel, and nearly equal for constants."""
    kind, channels, options, shape = data.draw(convolutions(False))
    torch.manual_seed(seed)
    layer = kind(*channels, **options).double()
    x, b = sides(layer, shape, 2, torch.float64)
    for one, other in ((x, b), (torch.ones_like(x), torch.ones_like(b)), (x.exp(), b.exp())):
        kernel = convolution._Kernel(layer, one, other)
        _, reach = kernel._norms_of_rows()
        assert bool((kernel._reach() >= reach * (1 - 1e-13)).all())


def test_a_pixel_counted_once_would_be_caught(monkeypatch):
    """The planted bug: n = 1 where windows overlap."""
    layer = nn.Conv2d(2, 3, 3)
    x, b = torch.ones(1, 2, 9, 9), torch.ones(1, 3, 7, 7)
    kernel = convolution._Kernel(layer, x, b)
    _, reach = kernel._norms_of_rows()
    assert float(kernel._reach()) >= float(reach)
    monkeypatch.setattr(Axis, "overlap", 1)
    assert float(kernel._reach()) < float(reach)


def test_windows_over_a_pixel_are_counted():
    def most(count, kernel, stride, dilation):
        return Axis(count, kernel, stride, dilation).overlap

    assert most(9, 3, 1, 1) == 3
    assert most(9, 3, 2, 1) == 2
    assert most(9, 3, 3, 1) == 1
    assert most(9, 3, 5, 1) == 1
    assert most(9, 3, 2, 2) == 3  # all three places of a window are a stride apart
    assert most(1, 3, 1, 1) == 1


def test_rows_that_lie_with_channels_last_are_read_as_they_lie():
    torch.manual_seed(0)
    lying = torch.randn(4, 5, 3, 2, 6, dtype=torch.float64)
    rows, scale = lying.movedim(-1, 2), torch.rand(4, dtype=torch.float64)
    for found in (Stacked(rows), Stacked(rows.contiguous())):
        assert torch.allclose(found.total(scale), torch.einsum("b,b...->...", scale, rows))
        assert torch.allclose(found.squares(), rows.flatten(1).square().sum(dim=1))
    assert Stacked(rows)._as_they_lie().is_contiguous()
