"""Convolutions stay in their sets, and answer only for images that their sets are for."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial

import pytest
import torch
from convolution_cases import MODES, convolutions, dense, true_norm, with_random_kernel
from hypothesis import HealthCheck, assume, given, settings
from torch import nn

from tacit.errors import UnboundedLayer
from tacit.lipschitz import (
    Bound,
    BoundedInput,
    ReshapedKernel,
    SpectralConv1d,
    SpectralConv2d,
    SpectralConv3d,
    SpectralLinear,
    TrueConvolution,
    audit_layer,
    enforce,
    project,
    propagate,
)
from tacit.lipschitz.sets import SLACK

quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
SETS = [ReshapedKernel, TrueConvolution]


@pytest.mark.parametrize("within", SETS)
@quick
@given(case=convolutions())
def test_projection_bounds_the_true_norm(within, case):
    layer, sizes = case
    assume(all(axis.covers(n) for axis, n in zip(layer.axes, sizes, strict=True)))
    layer.within = within(layer.max_norm, layer.axes, layer.groups)
    for keep in (project, enforce):
        with_random_kernel(layer, 1)
        keep(layer)
        assert true_norm(layer, layer.in_channels, sizes) <= 1 + SLACK


@pytest.mark.parametrize("within", SETS)
@pytest.mark.parametrize("max_norm", [0.3, 1.0, 4.0])
def test_a_new_layer_is_in_its_set(within, max_norm):
    torch.manual_seed(0)
    for layer in (
        SpectralConv1d(3, 5, 4, stride=2, max_norm=max_norm, within=within),
        SpectralConv2d(4, 4, 3, padding=1, groups=2, max_norm=max_norm, within=within),
        SpectralConv3d(2, 3, 2, max_norm=max_norm, within=within),
        SpectralConv2d(3, 3, 5, padding="same", groups=3, max_norm=max_norm, within=within),
    ):
        before = layer.weight.detach().clone()
        certified = float(layer.within.norm_upper(before[None]))
        assert 0.99 * max_norm <= certified <= max_norm * (1 + SLACK)
        enforce(layer)
        assert torch.equal(before, layer.weight)


def largest_norm_after(layer, channels, sizes, steps):
    torch.manual_seed(0)
    largest = 0.0
    for step in range(steps):
        with torch.no_grad():
            noise = torch.randn_like(layer.weight)
            layer.weight.add_(noise, alpha=3.0 if step % 50 == 0 else 0.05)
        project(layer)
        if step % (steps // 20) == 0:
            largest = max(largest, true_norm(copy.deepcopy(layer).double(), channels, sizes))
    return largest


def test_thousands_of_noisy_steps_leave_the_norm_where_it_was():
    layer = SpectralConv2d(2, 3, 3, padding=1, input_size=5)
    assert 0.9 < largest_norm_after(layer, 2, (5, 5), 2000) <= 1 + SLACK


@pytest.mark.parametrize(
    ("layer", "channels", "sizes", "least"),
    [
        (SpectralConv2d(2, 2, 3, 1, 1, padding_mode="circular", input_size=6), 2, (6, 6), 0.98),
        (SpectralConv1d(4, 2, 5, 2, 2, 1, 2, padding_mode="reflect", input_size=6), 4, (6,), 0.6),
        (SpectralConv2d(2, 4, 3, padding=1, within=ReshapedKernel), 2, (5, 5), 0.5),
        (SpectralConv2d(3, 8, 2, stride=2, max_norm=0.7), 3, (4, 4), 0.69),
    ],
)
def test_noisy_steps_leave_every_kind_where_it_was(layer, channels, sizes, least):
    assert least < largest_norm_after(layer, channels, sizes, 100) <= layer.max_norm * (1 + SLACK)


def test_true_convolutions_are_larger_than_reshaped_kernels():
    torch.manual_seed(0)
    for shape, how in (
        ((16, 16, 3), {"padding": 1}),
        ((8, 16, 5), {"padding": 2}),
        ((16, 16, 3), {"padding": 1, "stride": 2}),
    ):
        reshaped, true = (SpectralConv2d(*shape, within=within, **how).weight for within in SETS)
        ratio = float(true.detach().norm() / reshaped.detach().norm())
        # With a stride of 2 fewer taps meet one pixel, and there is less to win.
        assert ratio > (1.3 if "stride" in how else 1.5)


def test_the_average_overlap_does_not_normalise():
    """Published: divide an orthogonal kernel by the root of the *mean* number of reads.

    A kernel with one output for each tap is orthogonal once flattened and has norm √reads, the
    most, not the mean: on 4×4 pixels that is 20% more.
    """
    layer = SpectralConv2d(1, 9, 3, padding=1, input_size=4, within=ReshapedKernel).double()
    with torch.no_grad():
        layer.weight.copy_(torch.eye(9).reshape(9, 1, 3, 3))
    mean_reads = ((3 * 4 - 2) / 4) ** 2
    assert true_norm(layer, 1, (4, 4)) / math.sqrt(mean_reads) == pytest.approx(1.2)
    project(layer)
    assert true_norm(layer, 1, (4, 4)) == pytest.approx(1.0, rel=1e-3)


def test_reflected_pixels_make_a_kernel_smaller():
    """Nine outputs, one a tap: norm 4 under reflect padding, not 3."""
    layer = SpectralConv2d(1, 9, 3, padding=1, padding_mode="reflect", within=ReshapedKernel)
    layer = layer.double()
    with torch.no_grad():
        layer.weight.copy_(torch.eye(9).reshape(9, 1, 3, 3))
    assert true_norm(layer, 1, (5, 5)) == pytest.approx(4.0)
    enforce(layer)
    assert true_norm(layer, 1, (5, 5)) == pytest.approx(1.0, rel=1e-3)


def test_another_size_than_declared_is_refused():
    model = nn.Sequential(BoundedInput(), SpectralConv2d(1, 2, 3, padding=1, input_size=(8, 8)))
    propagate(model, 1.0, (1, 8, 8))
    for sizes in ((9, 9), (7, 8), (8, 16)):
        with pytest.raises(UnboundedLayer, match="input_size"):
            propagate(model, 1.0, (1, *sizes))


def test_without_a_size_any_image_will_do_under_zero_padding():
    layer = SpectralConv2d(1, 2, 3, padding=1, stride=2)
    for size in (1, 2, 3, 8, 31):
        assert layer.lipschitz(Bound(1.0, (1, size, size))) == 1 + SLACK


@pytest.mark.parametrize(
    ("mode", "sizes", "stride"), [("circular", (7, 8), 2), ("reflect", (3, 9), 1)]
)
def test_images_on_which_a_pixel_is_used_more_often_need_their_size(mode, sizes, stride):
    how = {"stride": stride, "padding": 1, "padding_mode": mode}
    free = nn.Sequential(BoundedInput(), SpectralConv2d(1, 2, 3, **how))
    propagate(free, 1.0, (1, 16, 16))
    with pytest.raises(UnboundedLayer, match="declare input_size"):
        propagate(free, 1.0, (1, *sizes))
    propagate(nn.Sequential(BoundedInput(), SpectralConv2d(1, 2, 3, **how, input_size=sizes)), 1.0,
              (1, *sizes))  # fmt: skip


def test_a_record_without_spatial_axes_is_refused():
    with pytest.raises(UnboundedLayer, match="spatial axes"):
        propagate(SpectralConv2d(1, 2, 3), 1.0, (1, 8), input_norm=1.0)


def test_a_size_that_fits_no_window_is_refused():
    with pytest.raises(ValueError, match="no window"):
        SpectralConv2d(1, 2, 5, input_size=4)
    with pytest.raises(ValueError, match="give 2 numbers"):
        SpectralConv2d(1, 2, 5, input_size=(3, 8, 8))


@pytest.mark.parametrize("mode", MODES)
def test_the_layers_compute_what_pytorch_s_compute(mode):
    ours = SpectralConv2d(2, 4, (3, 2), (2, 1), (2, 1), (1, 2), 2, True, mode)
    theirs = nn.Conv2d(2, 4, (3, 2), (2, 1), (2, 1), (1, 2), 2, True, mode)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 2, 7, 8)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (SpectralConv2d(2, 3, 3, padding=1, bias=True), (2, 6, 6)),
        (SpectralConv2d(2, 3, 2, stride=2), (2, 6, 6)),
        (SpectralConv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular"), (4, 5, 5)),
        (SpectralConv1d(2, 2, 3, padding=2, dilation=2, padding_mode="reflect"), (2, 12)),
        (SpectralConv2d(2, 3, 3, padding=1, within=ReshapedKernel, max_norm=2.0), (2, 4, 4)),
    ],
)
def test_the_audit_finds_nothing(layer, shape):
    audit_layer(layer, shape, input_norm=2.0).require()


def test_one_record_s_gradient_stays_within_what_a_network_says():
    torch.manual_seed(0)
    model = nn.Sequential(
        BoundedInput(1.0),
        SpectralConv2d(1, 8, 3, padding=1, bias=True),
        nn.ReLU(),
        SpectralConv2d(8, 8, 3, stride=2, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Flatten(),
        SpectralLinear(8 * 16, 4),
    )
    bounds = propagate(model, 1.0, (1, 8, 8)).by_parameter
    for seed in range(20):
        torch.manual_seed(seed)
        x = torch.ones(1, 1, 8, 8) + 0.1 * seed * torch.randn(1, 1, 8, 8)
        model.zero_grad()
        y = model(10 * x)
        (y * torch.nn.functional.normalize(torch.randn_like(y))).sum().backward()
        for name, p in model.named_parameters():
            assert float(p.grad.norm()) <= bounds[name]


def test_a_depthwise_kernel_is_scaled_channel_by_channel():
    layer = with_random_kernel(SpectralConv2d(4, 4, 3, padding=1, groups=4, input_size=6), 0)
    project(layer)
    operator = dense(copy.deepcopy(layer).double(), 4, (6, 6)).reshape(4, 36, 4, 36)
    norms = [float(torch.linalg.matrix_norm(operator[c, :, c], 2)) for c in range(4)]
    assert all(0.9 < norm <= 1 + SLACK for norm in norms)


def test_layers_of_one_kind_are_one_set():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (SpectralConv2d(4, 4, 3, padding="same") for _ in range(2))
    assert first.within == second.within
    assert hash(first.within) == hash(second.within)


SURGERY = {
    "stride": (1, 1),
    "padding": (1, 1),
    "dilation": (2, 2),
    "groups": 2,
    "padding_mode": "circular",
    "weight": nn.Parameter(torch.zeros(8, 1, 5, 5)),
}


@pytest.mark.parametrize("name", SURGERY)
def test_a_setting_that_changed_after_the_layer_was_built_is_refused(name):
    conv = SpectralConv2d(4, 8, 3, stride=3, groups=4)
    here = Bound(1.0, (4, 6, 6))
    assert conv.lipschitz(here) <= 1 + SLACK
    conv.stride = 3  # says the same
    assert conv.lipschitz(here) <= 1 + SLACK
    setattr(conv, name, SURGERY[name])
    for answer in (conv.lipschitz, conv.output_norm, lambda x: conv.gradient_norms(x, 1.0)):
        with pytest.raises(ValueError, match="after it was built"):
            answer(here)


def test_padding_that_only_the_other_modes_read_is_seen_too():
    conv = SpectralConv2d(1, 1, 3, padding=1, padding_mode="circular", input_size=6)
    conv.padding = (5, 5)  # not read
    conv.lipschitz(Bound(1.0, (1, 6, 6)))
    conv._reversed_padding_repeated_twice = (2, 2, 2, 2)
    with pytest.raises(ValueError, match="after it was built"):
        conv.lipschitz(Bound(1.0, (1, 6, 6)))


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_padding_that_is_named_is_that_of_its_amount(mode, dilation):
    for name, amount in (("same", dilation), ("valid", 0)):
        options = {"dilation": dilation, "padding_mode": mode}
        named, given = (SpectralConv2d(1, 1, 3, padding=p, **options) for p in (name, amount))
        assert named.axes == given.axes
        named.lipschitz(Bound(1.0, (1, 9, 9)))
    if mode == "zeros":
        given.padding = "same"
        with pytest.raises(ValueError, match="after it was built"):
            given.lipschitz(Bound(1.0, (1, 9, 9)))


def test_negative_padding_is_refused():
    with pytest.raises(ValueError, match="padding is -1"):
        SpectralConv2d(1, 1, 3, padding=-1, padding_mode="circular")


@pytest.mark.parametrize("make", [SpectralLinear, partial(SpectralConv2d, kernel_size=1)])
@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_norm": 0.0}, "max_norm is 0"),
        ({"max_norm": -1.0}, "max_norm is -1"),
        ({"max_norm": math.nan}, "max_norm is nan"),
        ({"bias": True, "max_bias": -0.9}, "max_bias is -0.9"),
        ({"bias": True, "max_bias": math.inf}, "max_bias is inf"),
    ],
)
def test_limits_that_are_none_are_refused(make, limits, words):
    with pytest.raises(ValueError, match=words):
        make(3, 3, **limits)


def test_a_limit_that_becomes_negative_is_refused():
    layer = SpectralLinear(3, 3, bias=True)
    layer.max_bias = -0.9
    with pytest.raises(ValueError, match=r"max_norm is -0\.9"):
        layer.constraints()
