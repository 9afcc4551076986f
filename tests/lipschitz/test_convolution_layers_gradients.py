"""No image and cotangent give a longer gradient than a convolution says; some give one as long."""

from __future__ import annotations

import math

import pytest
import torch
from convolution_cases import (
    CLASSES,
    convolutions,
    filled_tori,
    steepest_gradient,
    weight_gradient,
)
from hypothesis import HealthCheck, assume, given, settings

from tacit.lipschitz import Bound, SpectralConv1d, SpectralConv2d

quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


def said(layer, sizes):
    return layer.gradient_norms(Bound(1.0, (layer.in_channels, *sizes)), 1.0)["weight"]


def make(mode, kernel, stride, padding, dilation, size, dims=1, **how):
    return CLASSES[dims](
        1,
        1,
        kernel,
        stride,
        padding,
        dilation,
        padding_mode=mode,
        input_size=size,
        dtype=torch.float64,
        **how,
    )


@quick
@given(convolutions(dims=(1, 2)))
def test_ascent_stays_within_the_bound(case):
    layer, sizes = case
    assume(all(axis.covers(n) for axis, n in zip(layer.axes, sizes, strict=True)))
    for seed in (0, 1):
        found = steepest_gradient(layer, sizes, seed, steps=10)
        assert found <= said(layer, sizes) * (1 + 1e-9)


@quick
@given(filled_tori())
def test_circular_padding_reaches_the_bound(case):
    """An image that is constant on pixels a stride apart, and a constant cotangent."""
    layer, sizes = case
    best = 0.0
    for residue in range(max(layer.stride)):
        x = torch.zeros(1, layer.in_channels, *sizes, dtype=torch.float64)
        at = tuple(slice(residue % s, None, s) for s in layer.stride)
        x[(0, 0, *at)] = 1.0
        with torch.no_grad():
            g = torch.zeros_like(layer(x))
        g[0, 0] = 1.0
        best = max(best, weight_gradient(layer, x, g))
    assert best <= said(layer, sizes) * (1 + 1e-9)
    if len(set(layer.stride)) == 1:
        shifted = [p % s == 0 for p, s in zip(layer.padding, layer.stride, strict=True)]
        assume(all(shifted) or len(sizes) == 1)
        assert best >= said(layer, sizes) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("mode", "kernel", "stride", "padding", "dilation", "size", "least"),
    [
        ("zeros", 3, 1, 1, 1, 16, 0.98),
        ("zeros", 5, 1, 2, 1, 16, 0.95),
        ("zeros", 3, 2, 1, 1, 8, 0.93),
        ("zeros", 4, 4, 0, 1, 16, 1.0),
        ("replicate", 3, 1, 1, 1, 6, 1.0),
        ("reflect", 3, 2, 1, 1, 8, 0.95),
        ("reflect", 5, 1, 2, 1, 8, 0.93),
    ],
)
def test_how_much_of_the_bound_ascent_reaches(mode, kernel, stride, padding, dilation, size, least):
    layer = make(mode, kernel, stride, padding, dilation, size)
    found = max(steepest_gradient(layer, (size,), seed) for seed in range(4))
    assert least * (1 - 1e-6) <= found / said(layer, (size,)) <= 1 + 1e-9


def test_a_kernel_gradient_is_not_divided_by_the_kernel_s_normalisation():
    """Published: X·G·(1 + small) for a kernel divided by √reads. It is three times as long."""
    layer = make("zeros", 3, 1, 1, 1, (16, 16), dims=2)
    found = max(steepest_gradient(layer, (16, 16), seed) for seed in range(2))
    published = math.sqrt(1 / ((1 - 1 / 16) * (1 - 1 / 16)))
    assert found > 2.7 * published
    assert found <= said(layer, (16, 16)) == 3.0


def test_reflected_pixels_count_as_often_as_they_are_read():
    """The rule of zero padding, √∏⌈k/s⌉, is exceeded on a small reflected image."""
    layer = make("reflect", 3, 1, 1, 1, (3, 3), dims=2)
    found = max(steepest_gradient(layer, (3, 3), seed) for seed in range(4))
    assert found > 1.3 * math.sqrt(9)
    assert found <= said(layer, (3, 3)) == math.sqrt(25)


def test_a_dilation_that_shares_a_factor_with_the_stride_reads_more():
    """k = 3, s = d = 2: all taps meet the same pixels, so ⌈k/s⌉ = 2 is too few."""
    layer = make("zeros", 3, 2, 2, 2, 32)
    found = max(steepest_gradient(layer, (32,), seed) for seed in range(2))
    assert found > 1.2 * math.sqrt(2)
    assert found <= said(layer, (32,)) == math.sqrt(3)


def test_a_kernel_larger_than_its_torus_meets_a_pixel_twice():
    layer = make("circular", 5, 1, 2, 1, 3)
    x, g = torch.ones(1, 1, 3, dtype=torch.float64), torch.ones(1, 1, 3, dtype=torch.float64)
    assert weight_gradient(layer, x, g) == pytest.approx(math.sqrt(5))
    assert said(layer, (3,)) == pytest.approx(math.sqrt(5))


def test_windows_that_repeat_are_counted_again():
    """Circular padding beyond the kernel gives outputs that are there already."""
    layer = make("circular", 1, 1, 2, 1, 2)
    x, g = torch.ones(1, 1, 2, dtype=torch.float64), torch.ones(1, 1, 6, dtype=torch.float64)
    assert weight_gradient(layer, x, g) == pytest.approx(math.sqrt(3))
    assert said(layer, (2,)) == pytest.approx(math.sqrt(3))


def test_patches_have_the_constant_of_a_linear_layer():
    layer = SpectralConv2d(3, 5, 4, stride=4)
    assert said(layer, (16, 16)) == 1.0


@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_has_the_same_constant_reached_by_one_channel(multiplier):
    layer = SpectralConv2d(
        3, 3 * multiplier, 3, padding=1, groups=3, padding_mode="circular", dtype=torch.float64
    )
    x = torch.zeros(1, 3, 6, 6, dtype=torch.float64)
    g = torch.zeros(1, 3 * multiplier, 6, 6, dtype=torch.float64)
    x[:, 1], g[:, multiplier] = 1.0, 1.0
    assert weight_gradient(layer, x, g) == pytest.approx(3.0)
    assert said(layer, (6, 6)) == 3.0


def test_a_bias_is_used_at_every_position():
    """Published: G. A constant cotangent gives √P·G."""
    layer = SpectralConv1d(2, 3, 3, bias=True, dtype=torch.float64)
    x, g = torch.zeros(1, 2, 30, dtype=torch.float64), torch.zeros(1, 3, 28, dtype=torch.float64)
    g[0, 0] = 1 / math.sqrt(28)
    (layer(x) * g).sum().backward()
    bound = layer.gradient_norms(Bound(1.0, (2, 30)), 1.0)["bias"]
    assert float(layer.bias.grad.norm()) == pytest.approx(bound) == pytest.approx(math.sqrt(28))
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias[0] = 1.0
    assert float(layer(x).norm()) == pytest.approx(math.sqrt(28))
    assert layer.output_norm(Bound(0.0, (2, 30))) == pytest.approx(math.sqrt(28), rel=1e-3)
