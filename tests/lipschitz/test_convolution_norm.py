"""A convolution's bound is never below the dense operator's norm, and exact where it says so."""

from __future__ import annotations

import math

import pytest
import torch
from convolution_cases import (
    CLASSES,
    MODES,
    convolutions,
    dense,
    filled_tori,
    operator_norm_exact,
    true_norm,
    with_random_kernel,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tacit.lipschitz import SpectralConv1d, SpectralConv2d
from tacit.lipschitz.layers.convolution_layers import axes_of
from tacit.lipschitz.operator_norm import (
    Axis,
    convolution_norm_upper,
    reshaped_norm_upper,
    torus_norm_upper,
)
from tacit.lipschitz.sets import in_groups

quick = settings(
    max_examples=70, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


def kernels(layer):
    return in_groups(layer.weight.detach()[None], layer.groups)


def covered(layer, sizes):
    return all(axis.covers(n) for axis, n in zip(layer.axes, sizes, strict=True))


@quick
@given(convolutions())
def test_both_bounds_are_above_the_norm(case):
    layer, sizes = case
    assume(covered(layer, sizes))
    truth = true_norm(layer, layer.in_channels, sizes)
    for bound in (reshaped_norm_upper, torus_norm_upper, convolution_norm_upper):
        assert float(bound(kernels(layer), layer.axes).max()) >= truth


@quick
@given(convolutions(sized=(False,)))
def test_a_bound_without_a_size_is_above_the_norm_at_every_size_that_it_covers(case):
    layer, sizes = case
    bound = float(convolution_norm_upper(kernels(layer), layer.axes).max())
    for more in range(4):
        larger = tuple(n + more for n in sizes)
        if math.prod(larger) * layer.in_channels <= 300 and covered(layer, larger):
            assert bound >= true_norm(layer, layer.in_channels, larger)


@quick
@given(filled_tori())
def test_the_torus_is_exact_where_outputs_fill_it(case):
    layer, sizes = case
    assert all(a.outputs(n) * a.stride == n for a, n in zip(layer.axes, sizes, strict=True))
    bound = torus_norm_upper(
        kernels(layer), layer.axes, density=math.inf, norms=operator_norm_exact
    ).max()
    assert float(bound) == pytest.approx(true_norm(layer, layer.in_channels, sizes), rel=1e-3)


@quick
@given(convolutions())
def test_reads_are_the_norm_of_unfolding(case):
    """A kernel with one output for each tap is the unfolding itself."""
    layer, sizes = case
    taps = math.prod(layer.kernel_size)
    unfold = CLASSES[len(sizes)](
        1,
        taps,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        padding_mode=layer.padding_mode,
        input_size=sizes,
        dtype=torch.float64,
    )
    with torch.no_grad():
        unfold.weight.copy_(torch.eye(taps).reshape(unfold.weight.shape))
    reads = math.prod(axis.usage().reads for axis in unfold.axes)
    squares = dense(unfold, 1, sizes).square().sum(dim=0)
    most = round(float(squares.max()))
    # An axis along which no window reads a pixel counts as read once, whatever the others do: that
    # is from above, and where nothing is read at all there is nothing to be tight about.
    assert reads == most or (most == 0 and reads >= 1)


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_zero_padding_reads_a_pixel_through_one_tap_in_stride_over_gcd(kernel, stride, dilation):
    axis = Axis(kernel, stride, dilation, 2, 2)
    formula = math.ceil(kernel * math.gcd(stride, dilation) / stride)
    assert axis.usage().reads == formula
    sizes = range(kernel * dilation, kernel * dilation + 40)
    assert max(axis.reads(n) for n in sizes) == formula


def test_padding_same_is_padded_as_pytorch_pads_it():
    for mode in MODES:
        layer = SpectralConv1d(1, 1, 4, padding="same", padding_mode=mode, input_size=6)
        with_random_kernel(layer.double(), 0)
        assert (layer.axes[0].before, layer.axes[0].after) == (1, 2)
        assert float(convolution_norm_upper(kernels(layer), layer.axes)) >= true_norm(
            layer, 1, (6,)
        )
    both = SpectralConv2d(1, 1, (2, 5), padding="same", input_size=(4, 7))
    assert [(a.before, a.after) for a in both.axes] == [(0, 1), (2, 2)]


def test_on_a_torus_of_the_image_s_own_size_zero_padding_is_not_bounded():
    """The second difference on 5 pixels: an odd torus has no frequency π, the padded image does."""
    padded = SpectralConv1d(1, 1, 3, padding=1, input_size=5, dtype=torch.float64)
    torus = SpectralConv1d(
        1, 1, 3, padding=1, input_size=5, padding_mode="circular", dtype=torch.float64
    )
    for layer in (padded, torus):
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[[-1.0, 2.0, -1.0]]]))
    truth = true_norm(padded, 1, (5,))
    assert truth == pytest.approx(2 + 2 * math.cos(math.pi / 6))
    assert float(torus_norm_upper(kernels(torus), torus.axes)) < 0.98 * truth
    assert float(torus_norm_upper(kernels(padded), padded.axes)) >= truth


@quick
@given(
    st.integers(2, 6), st.integers(1, 3), st.floats(1.2, 8), st.integers(0, 10**6), st.booleans()
)
def test_few_angles_bound_all_angles(kernel, channels, density, seed, two):
    shape = (kernel, kernel) if two else (kernel,)
    stack = torch.randn(1, 1, 2, channels, *shape, generator=torch.Generator().manual_seed(seed))
    axes = [Axis(kernel)] * len(shape)
    fine = (
        torus_norm_upper(stack, axes, density=40, norms=operator_norm_exact)
        * math.cos(math.pi / 80) ** 2
    )
    assert float(torus_norm_upper(stack, axes, density=density)) >= 0.9995 * float(fine)


def test_the_inequality_for_few_angles_is_reached():
    """cos(Dθ) with its maximum between two angles, which is the worst that can happen."""
    angles, taps = 4, 3
    shift = math.pi / angles
    wave = (
        torch.tensor([math.cos(shift), 0.0, math.cos(shift)]),
        torch.tensor([-math.sin(shift), 0.0, math.sin(shift)]),
    )
    # Re and Im of e^(iθ−iφ) + e^(−iθ+iφ) as one complex multiplication of two real channels.
    real, imaginary = wave
    block = torch.stack([torch.stack([real, -imaginary]), torch.stack([imaginary, real])])
    axes = [Axis(taps)]
    bound = torus_norm_upper(
        block[None, None], axes, density=angles / (taps - 1), norms=operator_norm_exact
    )
    assert float(bound) == pytest.approx(2.0, rel=1e-2)


def test_power_iteration_is_caught_by_the_certificate():
    """One direction in 64 is 10% longer: ten steps of power iteration stop halfway to it."""
    torch.manual_seed(0)
    channels, size = 64, 8
    layer = SpectralConv2d(channels, channels, 3, padding=1, input_size=size).double()
    centre = torch.linalg.qr(torch.randn(channels, channels, dtype=torch.float64))[0]
    centre[:, 0] *= 1.1
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:, :, 1, 1] = centre
    x = torch.randn(1, channels, size, size, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(10):
            x = x / x.norm()
            from_below = float(layer(x).norm())
            x = F.conv_transpose2d(layer(x), layer.weight, padding=1)
    assert from_below < 1.07
    certified = float(layer.within.norm_upper(layer.weight.detach()[None]))
    assert 1.1 <= certified < 1.12


def test_groups_are_bounded_apart_and_depthwise_is_one_number_a_frequency():
    layer = SpectralConv2d(4, 4, 3, padding=1, padding_mode="circular", groups=4, input_size=6)
    with_random_kernel(layer.double(), 3)
    spectrum = torch.fft.fft2(layer.weight.detach()[:, 0], s=(6, 6)).abs().amax(dim=(1, 2))
    bounds = torus_norm_upper(kernels(layer), layer.axes)[0]
    torch.testing.assert_close(bounds, spectrum, rtol=1e-6, atol=0)


def test_a_kernel_larger_than_its_torus_wraps_around():
    layer = SpectralConv1d(1, 1, 5, padding=2, padding_mode="circular", input_size=3).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[1.0, 1.0, 1.0, -1.0, -1.0]]]))
    assert float(torus_norm_upper(kernels(layer), layer.axes)) == pytest.approx(
        true_norm(layer, 1, (3,)), rel=1e-6
    )


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_the_bound_is_tight_on_common_layers(mode):
    for seed in range(3):
        layer = SpectralConv2d(5, 4, 3, padding=1, padding_mode=mode, input_size=8).double()
        with_random_kernel(layer, seed)
        bound = float(convolution_norm_upper(kernels(layer), layer.axes).max())
        loose = float(reshaped_norm_upper(kernels(layer), layer.axes).max())
        truth = true_norm(layer, 5, (8, 8))
        assert truth <= bound < 1.06 * truth
        assert loose > 1.3 * truth


def test_axes_are_those_of_any_convolution_of_pytorch_s():
    layer = torch.nn.Conv2d(1, 1, (3, 5), stride=(2, 1), padding=(1, 0), dilation=(1, 2))
    first, second = axes_of(layer, (8, 9))
    assert first == Axis(3, 2, 1, 1, 1, "zeros", 8)
    assert second == Axis(5, 1, 2, 0, 0, "zeros", 9)


def test_two_kernels_are_bounded_at_once():
    a, b = (with_random_kernel(SpectralConv2d(3, 4, 3, padding=1).double(), i) for i in range(2))
    both = torch.cat([kernels(a), kernels(b)])
    each = torch.cat([convolution_norm_upper(kernels(c), a.axes) for c in (a, b)])
    torch.testing.assert_close(convolution_norm_upper(both, a.axes), each)
