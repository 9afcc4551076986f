"""Enforcing is idempotent, bit for bit, in every type, and certifies what the model holds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tacit
from tacit.lipschitz import AddBias, FrobeniusLinear, SpectralConv2d, SpectralLinear
from tacit.lipschitz.projection import constraints_of, enforce
from tacit.lipschitz.sets import SLACK, ReshapedKernel, SpectralBall

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def shared() -> nn.Module:
    """One weight in two sets, of different limits."""
    first, second = SpectralLinear(6, 6, max_norm=0.9), FrobeniusLinear(6, 6, max_norm=2.0)
    second.weight = first.weight
    return nn.Sequential(first, second)


LAYERS = {
    "orthogonal": lambda: SpectralLinear(40, 24, bias=True),
    "large": lambda: SpectralLinear(300, 300, max_norm=3.0),
    "ball": lambda: SpectralLinear(24, 24, within=SpectralBall),
    "frobenius": lambda: FrobeniusLinear(30, 10, bias=True),
    "bias": lambda: AddBias(50, 0.3),
    "convolution": lambda: SpectralConv2d(3, 8, 3, padding=1, input_size=6, bias=True),
    "grouped": lambda: SpectralConv2d(4, 8, 3, groups=2, padding=1),
    "reshaped": lambda: SpectralConv2d(3, 8, 3, padding=1, within=ReshapedKernel),
    "shared": shared,
}


def away(name: str, dtype: torch.dtype, by: float = 1.0) -> nn.Module:
    """The layer with weights that are outside their sets."""
    torch.manual_seed(0)
    layer = LAYERS[name]().to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(by * torch.randn_like(p))
    return layer


def weights(layer: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in layer.parameters()]


def assert_same(layer: nn.Module, before: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(weights(layer), before, strict=True))


def assert_inside(layer: nn.Module) -> None:
    for constraint in constraints_of(layer):
        held = constraint.parameter.detach()[None].double()
        norm = float(constraint.within.norm_upper(held))
        assert norm <= constraint.within.max_norm * (1 + SLACK)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_the_second_call_changes_nothing(name, dtype):
    layer = away(name, dtype)
    enforce(layer)
    assert_inside(layer)
    held = weights(layer)
    for _ in range(5):
        enforce(layer)
    assert_same(layer, held)
    # Certified from the beginning, as a new model of the same weights.
    again = copy.deepcopy(layer)
    enforce(again)
    assert_same(again, held)
    # PyTorch counts this as a write: certified anew.
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(1)
    enforce(layer)
    assert_same(layer, held)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_what_was_projected_is_left_alone(name, dtype):
    layer = away(name, dtype, by=0.2)
    tacit.project(layer)
    assert_inside(layer)
    held = weights(layer)
    for _ in range(3):
        enforce(layer)
    assert_same(layer, held)
    again = copy.deepcopy(layer)
    enforce(again)
    assert_same(again, held)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_calls_keep_the_weights(dtype):
    model = nn.Sequential(away("orthogonal", dtype), away("shared", dtype))
    enforce(model)
    held = weights(model)
    for _ in range(1000):
        enforce(model)
    assert_same(model, held)
    assert float(held[0].double().norm()) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["orthogonal", "convolution", "shared"])
def test_a_write_through_data_is_mended_once(name, dtype):
    layer = away(name, dtype)
    enforce(layer)
    for p in layer.parameters():
        p.data.mul_(3)
    enforce(layer)
    assert_inside(layer)
    held = weights(layer)
    for _ in range(20):
        enforce(layer)
    assert_same(layer, held)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_little_is_lost_to_rounding(dtype):
    """An orthogonal weight in half precision keeps most of its norm."""
    layer = away("orthogonal", dtype, by=0.1)
    tacit.project(layer)
    smallest = torch.linalg.svdvals(layer.weight.detach().double()).min()
    assert float(smallest) > (0.9 if dtype is torch.bfloat16 else 0.98)
