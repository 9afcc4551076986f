"""Turns an ordinary feed-forward network into its Lipschitz twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd

from tacit.lipschitz.convolution_sets import ReshapedKernel, TrueConvolution
from tacit.lipschitz.layers import (
    BoundedInput,
    LayerCentering,
    MaxMin,
    ScaledL2NormPool2d,
    SpectralConv1d,
    SpectralConv2d,
    SpectralConv3d,
    SpectralLinear,
)
from tacit.lipschitz.layers.absolute import Absolute
from tacit.lipschitz.projection import project

_CONVOLUTIONS = {
    nn.Conv1d: SpectralConv1d,
    nn.Conv2d: SpectralConv2d,
    nn.Conv3d: SpectralConv3d,
}
_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Softplus, nn.Hardswish, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid,
    nn.Softsign, nn.RReLU,
)  # fmt: skip


class Twin(NamedTuple):
    """A model that the clipless route can train, and in words what was changed to make it one."""

    model: nn.Module
    changes: tuple[str, ...]


def norm_preserving(channels: int) -> nn.Module:
    """MaxMin, or the absolute value where the channels are odd."""
    return MaxMin() if channels and channels % 2 == 0 else Absolute()


def lipschitz_twin(
    model: nn.Module,
    *,
    input_norm: float = 1.0,
    sphere: bool = False,
    activation: Callable[[int], nn.Module] = norm_preserving,
    reshaped: bool = False,
) -> Twin:
    """A copy of the model made of layers with known constants, behind a bounded input.

    Linear layers and convolutions keep their shapes and their weights, which are then projected
    onto orthogonal ones, and lose their biases (a bias costs noise at every position).
    Activations become `activation(channels)`, by default MaxMin, or the absolute value where the
    channels are odd: both keep the norms of gradients. Normalisation becomes centring over a
    record's own axes; dropout goes; average pooling, which shrinks what it averages, becomes
    L2-norm pooling. `reshaped=True` bounds kernels by their flattened matrices, which costs less
    than the convolution's own norm and leaves them smaller. What is left must be
    known to `propagate`, which says so by name when it is not. Layers and weights that are shared
    stay so. The twin computes something else than the model did: train it.
    """
    memo: dict[int, Any] = {}
    changes: list[str] = []
    channels = 0
    for name, module in model.named_modules():
        made = _replacement(module, channels, activation, reshaped)
        channels = getattr(module, "out_channels", getattr(module, "out_features", channels))
        if made is None:
            continue
        new, why = made
        memo[id(module)] = new.train(module.training)
        where = f"layer {name!r}" if name else "the model"
        changes.append(f"{where}: {_brief(module)} → {_brief(new)}: {why}")
    twin = nn.Sequential(BoundedInput(input_norm, sphere=sphere), copy.deepcopy(model, memo))
    changes.insert(0, f"in front: {twin[0]}: the bound on the input is enforced")
    twin.train(model.training)
    project(twin)
    return Twin(twin, tuple(changes))


def _replacement(
    module: nn.Module, channels: int, activation: Callable[[int], nn.Module], reshaped: bool
) -> tuple[nn.Module, str] | None:
    if type(module) is nn.Linear:
        linear = SpectralLinear(
            module.in_features,
            module.out_features,
            device=module.weight.device,
            dtype=module.weight.dtype,
        )
        return _with_weight(linear, module.weight), "its norm is bounded"
    if type(module) in _CONVOLUTIONS:
        return _convolution(module, reshaped), "its norm is bounded"
    if isinstance(module, _ConvTransposeNd):
        return None  # `propagate` refuses it by name
    if isinstance(module, _ACTIVATIONS):
        return activation(channels), "it keeps the norm of gradients"
    if isinstance(module, _NormBase | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
        return LayerCentering(), "dividing by a deviation has no Lipschitz constant"
    if isinstance(module, _DropoutNd):
        return nn.Identity(), "it adds noise to what is noisy enough"
    if type(module) is nn.AvgPool2d:
        kernel, stride = module.kernel_size, module.stride
        return ScaledL2NormPool2d(kernel, stride), "an average shrinks what it averages"
    return None


def _convolution(module: Any, reshaped: bool) -> nn.Module:
    make: Callable[..., Any] = _CONVOLUTIONS[type(module)]
    made = make(
        module.in_channels,
        module.out_channels,
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
        padding_mode=module.padding_mode,
        within=ReshapedKernel if reshaped else TrueConvolution,
        device=module.weight.device,
        dtype=module.weight.dtype,
    )
    return _with_weight(made, module.weight)


def _with_weight(made: Any, weight: torch.Tensor) -> nn.Module:
    with torch.no_grad():
        made.weight.copy_(weight)
    made.weight.requires_grad_(weight.requires_grad)
    layer: nn.Module = made
    return layer


def _brief(module: nn.Module) -> str:
    text = " ".join(str(module).split())
    return text if len(text) <= 90 else f"{type(module).__name__}(…)"
