"""Pooling, padding and upsampling against the singular values of what they really do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tacit.lipschitz import Bound, ScaledL2NormPool2d
from tacit.lipschitz.torch_modules import KNOWN


def jacobian_norm(module, x):
    """The largest singular value of ∂f/∂x at one record."""
    found = torch.autograd.functional.jacobian(lambda r: module(r[None])[0], x)
    return float(torch.linalg.matrix_norm(found.reshape(-1, x.numel()), 2))


def claim(module, shape):
    return KNOWN[type(module)](module).lipschitz(Bound(1.0, shape))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(3, 9),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    padding=st.integers(0, 2),
    ceil=st.booleans(),
    count=st.booleans(),
)
def test_average_pooling(size, kernel, stride, padding, ceil, count):
    kernel = min(kernel, size)
    padding = min(padding, kernel // 2)
    pool = nn.AvgPool1d(kernel, stride, padding, ceil_mode=ceil, count_include_pad=count)
    truth = jacobian_norm(pool, torch.zeros(1, size, dtype=torch.float64))
    assert truth <= claim(pool, (1, size)) <= 1.05 * truth


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(4, 9),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    ceil=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_max_pooling(size, kernel, stride, padding, dilation, ceil, seed):
    padding = min(padding, kernel // 2)
    if (kernel - 1) * dilation >= size + 2 * padding:
        return
    pool = nn.MaxPool1d(kernel, stride, padding, dilation, ceil_mode=ceil)
    bound = claim(pool, (1, size))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, size, generator=generator, dtype=torch.float64)
    assert jacobian_norm(pool, x) <= bound * (1 + 1e-12)
    # One number above all others is copied into every window that it is in.
    peaks = [
        jacobian_norm(pool, torch.eye(size, dtype=torch.float64)[i][None]) for i in range(size)
    ]
    assert max(peaks) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("pool", "shape", "constant"),
    [
        (nn.AvgPool2d(2), (3, 4, 4), 1 / 2),
        (nn.AvgPool2d(3, 3), (1, 6, 6), 1 / 3),
        (nn.AvgPool3d(2), (1, 4, 4, 4), 1 / math.sqrt(8)),
        (nn.AvgPool2d(2, divisor_override=1), (1, 4, 4), 2.0),
        (nn.AdaptiveAvgPool2d(1), (3, 4, 5), 1 / math.sqrt(20)),
        (nn.AdaptiveAvgPool1d(2), (1, 6), 1 / math.sqrt(3)),
        (nn.MaxPool2d(2), (1, 4, 4), 1.0),
        (nn.MaxPool2d(3, 1), (1, 8, 8), 3.0),
        (nn.MaxPool2d(3, 2), (1, 8, 8), 2.0),
        (nn.MaxPool3d(2, 1), (1, 4, 4, 4), math.sqrt(8)),
        (nn.AdaptiveMaxPool2d(2), (1, 4, 4), 1.0),
        (nn.AdaptiveMaxPool1d(2), (1, 5), math.sqrt(2)),
        (nn.ZeroPad2d(1), (1, 3, 3), 1.0),
        (nn.CircularPad2d(1), (1, 3, 3), 2.0),
        (nn.ReflectionPad2d(1), (1, 4, 4), 2.0),
        (nn.ReflectionPad2d(1), (1, 3, 3), 3.0),
        (nn.ReplicationPad2d(2), (1, 3, 3), 3.0),
        (nn.Upsample(scale_factor=2), (1, 3, 3), 2.0),
        (nn.Upsample(scale_factor=3), (1, 3), math.sqrt(3)),
    ],
)
def test_constants(pool, shape, constant):
    assert claim(pool, shape) == pytest.approx(constant, rel=1e-6)
    x = torch.randn(shape, dtype=torch.float64)
    assert jacobian_norm(pool, x) <= constant * (1 + 1e-9)


def test_overlapping_averages_are_not_shortened_by_the_average_overlap():
    """A pixel of the middle is in 9 windows, one of the rim in less; the norm is the middle's."""
    pool = nn.AvgPool2d(3, 1)
    truth = jacobian_norm(pool, torch.zeros(1, 12, 12, dtype=torch.float64))
    overlaps = 10 * 10 * 9 / 144
    assert truth > 1.1 * math.sqrt(overlaps / 9)
    assert truth <= claim(pool, (1, 12, 12)) <= 1.02 * truth


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(3, 8),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@example(size=7, kernel=3, stride=2, seed=0)
def test_norm_pooling(size, kernel, stride, seed):
    pool = ScaledL2NormPool2d(kernel, stride)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, size, size, generator=generator, dtype=torch.float64)
    bound = pool.lipschitz(Bound(1.0, (1, size, size)))
    assert bound <= 1
    assert jacobian_norm(pool, x) <= bound * (1 + 1e-12)
    assert float(pool(x[None]).norm()) <= bound * float(x.norm()) * (1 + 1e-12)


@pytest.mark.parametrize("size", [0.0, 1e-45, 3e-23, 1e-20, 1e-15])
def test_norm_pooling_near_zero(size):
    """Squares of small numbers are 0 in single precision, one by one."""
    pool = ScaledL2NormPool2d(3)
    x = torch.full((1, 1, 3, 3), size)
    x[0, 0, 0, 0] *= 1.5
    x.requires_grad_(True)
    y = pool(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.isfinite().all()
    assert float(gradient.double().norm()) <= 1 + 1e-6
    assert size or float(y.detach()) == 0
