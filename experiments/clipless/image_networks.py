"""The networks of the clipless runs on images; `name:size:…` says which.

linear            features or pixels on a sphere, one layer
centred           the same, each record centred first
mlp:w:…           hidden layers of w units
mixer:p:w[:d]     patches of p×p pixels
patches:p:w       disjoint patches, one layer
pooled:k:s:f:p    f filters of k×k at stride s, L2 pooling by p, one layer
convolution:…     pooled, with a second sphere after the pooling

All but the last are Lipschitz from the input sphere on, so that they have certificates. A sphere in
the middle has no constant: cotangents are clipped before it, which keeps gradients' bounds and
loses certificates.
"""

from __future__ import annotations

import math

import torch
from image_settings import Setting
from torch import nn

import tacit
from tacit.lipschitz import (
    BoundedInput,
    ClipGradient,
    LayerCentering,
    MaxMin,
    ScaledL2NormPool2d,
    SpectralBall,
    SpectralConv2d,
    SpectralLinear,
)


def build(setting: Setting, shape: tuple[int, ...], classes: int) -> nn.Module:
    kind, sizes = kind_and_sizes(setting.model)
    if kind == "mlp":
        made = tacit.models.lipschitz_mlp(shape, classes, hidden=sizes)
        return with_head(list(made)[:-1], shape, classes, setting.head)
    if kind == "mixer":
        made = tacit.models.lipschitz_mixer(shape, classes, *sizes)
        return with_head(list(made)[:-1], shape, classes, setting.head)
    if kind == "linear":
        return with_head([BoundedInput(1.0, sphere=True)], shape, classes, "ball")
    if kind == "centred":
        return with_head(_front(), shape, classes, setting.head)
    if kind == "patches":
        patch, width = sizes
        layers = _pooled(shape, patch, patch, width, 1)
        return with_head(layers, shape, classes, setting.head)
    if kind == "pooled":
        return with_head(_pooled(shape, *sizes), shape, classes, setting.head)
    if kind == "convolution":
        layers = [*_pooled(shape, *sizes), *_second_sphere(setting, classes)]
        return with_head(layers, shape, classes, setting.head)
    raise ValueError(f"no model is called {kind!r}")


def has_certificates(setting: Setting) -> bool:
    """Whether the network is Lipschitz in pixels but for the sphere it begins with."""
    kind, _ = kind_and_sizes(setting.model)
    plain = setting.features == "pixels" and setting.channels is None and setting.centre is None
    return plain and kind != "convolution"


def fixed_filters(features: str, shape: tuple[int, ...]) -> nn.Module:
    """Filters drawn once, from a public seed, and never trained: `filters:k:s:f:p`."""
    _, sizes = kind_and_sizes(features)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*_pooled(shape, *sizes)).requires_grad_(False)


def kind_and_sizes(model: str) -> tuple[str, list[int]]:
    kind, *numbers = model.split(":")
    return kind, [int(number) for number in numbers]


def with_head(
    layers: list[nn.Module], shape: tuple[int, ...], classes: int, head: str
) -> nn.Sequential:
    """A linear layer after the others. In the ball it begins at 0."""
    body = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        width = math.prod(body(torch.zeros(1, *shape)).shape[1:])
    if head == "orthogonal":
        return nn.Sequential(*body, SpectralLinear(width, classes))
    if head != "ball":
        raise ValueError(f"head is {head!r}; give 'orthogonal' or 'ball'")
    last = SpectralLinear(width, classes, within=SpectralBall)
    nn.init.zeros_(last.weight)
    return nn.Sequential(*body, last)


def _front() -> list[nn.Module]:
    return [LayerCentering(), BoundedInput(1.0, sphere=True)]


def _pooled(
    shape: tuple[int, ...], kernel: int, stride: int, filters: int, pool: int
) -> list[nn.Module]:
    convolution = SpectralConv2d(shape[0], filters, kernel, stride=stride)
    pooling = [ScaledL2NormPool2d(pool)] if pool > 1 else []
    return [*_front(), convolution, MaxMin(), *pooling]


def _second_sphere(setting: Setting, classes: int) -> list[nn.Module]:
    limit = ClipGradient(setting.middle * setting.gradient_clip(classes))
    centring = [LayerCentering((2, 3))] if setting.middle_centring else []
    return [limit, *centring, BoundedInput(1.0, sphere=True)]
