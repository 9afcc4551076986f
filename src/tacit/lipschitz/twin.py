"""Turns an ordinary feed-forward network into its Lipschitz twin.

The conversion goes down the tree of modules. Layers have counterparts, `nn.Sequential` keeps its
order, and any other module becomes a graph of its converted parts (`twin_graph`). Everything that
has no twin is found on the way, before a single weight is projected.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import skip_init

from tacit.errors import Refused, UnboundedLayer
from tacit.lipschitz.convolution_norm import torus_cost
from tacit.lipschitz.integrity import gives_answers, place, require_no_hooks
from tacit.lipschitz.layers.activations import Absolute, MaxMin
from tacit.lipschitz.layers.convolution_layers import (
    SpectralConv1d,
    SpectralConv2d,
    SpectralConv3d,
    axes_of,
)
from tacit.lipschitz.layers.inputs import BoundedInput, LayerCentering
from tacit.lipschitz.layers.linear import SpectralLinear
from tacit.lipschitz.layers.rearranging import ScaledL2NormPool2d
from tacit.lipschitz.operator_norm import orthogonalise_cost
from tacit.lipschitz.program import compile_program
from tacit.lipschitz.projection import project
from tacit.lipschitz.sets import FrobeniusBall, Orthogonal, ReshapedKernel, TrueConvolution
from tacit.lipschitz.torch_modules import KNOWN, REASONS
from tacit.lipschitz.twin_graph import graph_module

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
_NORMALISATIONS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# By name, so that the libraries that they are from need not be there.
_STOCHASTIC_DEPTH = ("StochasticDepth", "DropPath")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Activation = Callable[[int, int], nn.Module]


class Twin(NamedTuple):
    """A model that the clipless route can train, and in words what was changed to make it one."""

    model: nn.Module
    changes: tuple[str, ...]


def norm_preserving(channels: int, axis: int) -> nn.Module:
    """MaxMin, or the absolute value where the channels are odd."""
    return MaxMin(axis) if channels and channels % 2 == 0 else Absolute()


def lipschitz_twin(
    model: nn.Module,
    *,
    input_norm: float = 1.0,
    sphere: bool = False,
    activation: Activation = norm_preserving,
    reshaped: bool = False,
    max_cost: float = 1e11,
) -> Twin:
    """A copy of the model made of layers with known constants, behind a bounded input.

    Linear layers and convolutions keep their shapes and their weights, which are then projected
    onto orthogonal ones, and lose their biases (a bias costs noise at every position).
    Activations become `activation(channels, axis)`, by default MaxMin, or the absolute value where
    the channels are odd: both keep the norms of gradients. Normalisation becomes centring over a
    record's own axes; dropout and stochastic depth go; average pooling, which shrinks what it
    averages, becomes L2-norm pooling. A module with a forward of its own becomes the graph that
    `torch.fx` traces of it in evaluation mode, without writes in place: there sums of two values
    become averages, and a module's own scales and biases (layer scale) go. Layers and weights that
    are shared stay so. The twin computes something else than the model did: train it.

    Weights are certified anew in each step. `max_cost` limits the floating-point operations that
    this takes for one weight: a kernel that would take more is bounded by its flattened matrix, as
    all are with `reshaped=True`, and a matrix by its Frobenius norm. Both keep weights smaller.

    Raises `UnboundedLayer` for what has no twin, by name and before any projection.

        twin, changes = tacit.lipschitz_twin(torchvision.models.resnet18(num_classes=10))
    """
    require_no_hooks(model)
    conversion = _Conversion(model, activation, reshaped, max_cost)
    with _evaluating(model):
        body = conversion.of(model, "")
    conversion.require_complete(model)
    compile_program(body)
    twin = nn.Sequential(BoundedInput(input_norm, sphere=sphere), body)
    twin.train(model.training)
    project(twin)
    first = f"in front: {twin[0]}: the bound on the input is enforced"
    return Twin(twin, (first, *conversion.changes))


class _Conversion:
    """The modules that were converted so far, what was changed, and what has no twin."""

    def __init__(
        self, model: nn.Module, activation: Activation, reshaped: bool, max_cost: float
    ) -> None:
        self.activation, self.reshaped, self.max_cost = activation, reshaped, max_cost
        self.changes: list[str] = []
        self.refused: list[str] = []
        self._made: dict[int, Any] = {}  # by the id of what it takes the place of, as in deepcopy
        self._above: list[int] = []
        self._widths = _widths(model)

    def of(self, module: nn.Module, path: str) -> nn.Module:
        """The twin of a part; a part without one is noted, and an identity stands in for it."""
        if id(module) in self._made:
            known: nn.Module = self._made[id(module)]
            return known
        inside = id(module) in self._above
        self._above.append(id(module))
        try:
            if inside:
                raise Refused("it contains itself")
            made = self._converted(module, path)
        except Refused as refused:
            self.refused.append(f"{place(path, type(module))} has no Lipschitz twin: {refused}")
            made = nn.Identity()
        finally:
            self._above.pop()
        self._made[id(module)] = made
        return made

    def require_complete(self, model: nn.Module) -> None:
        """Refuse what has no twin. Attention first: there is no other way to write it."""
        if not self.refused:
            return
        attention = [
            f"{place(path, type(part))} has no Lipschitz twin: attention "
            f"{REASONS[nn.MultiheadAttention]}"
            for path, part in model.named_modules()
            if "attention" in type(part).__name__.lower()
        ]
        first, *others = attention or self.refused
        more = f" ({len(others)} more such layers)" if others else ""
        raise UnboundedLayer(first + more)

    def _converted(self, module: nn.Module, path: str) -> nn.Module:
        kind = type(module)
        if not gives_answers(kind):
            made = self._replacement(module, path)
            if made is not None:
                new, why = made
                self._note(path, f"{_brief(module)} → {_brief(new)}: {why}")
                return new
        if kind in REASONS:
            raise Refused(f"{kind.__name__} {REASONS[kind]}")
        if gives_answers(kind) or kind in KNOWN or kind in _CONTAINERS:
            return self._kept(module, path)
        if kind.forward is nn.Sequential.forward:
            # Not `named_children`, which leaves out a part that is there twice.
            parts = [
                (n, self.of(m, _join(path, n))) for n, m in module._modules.items() if m is not None
            ]
            return nn.Sequential(OrderedDict(parts))
        return graph_module(
            module,
            lambda name, part: self.of(part, _join(path, name)),
            lambda text: self._note(path, text),
        )

    def _kept(self, module: nn.Module, path: str) -> nn.Module:
        """A copy that does not write in place; its children are converted unless it answers."""
        if isinstance(module, _CONTAINERS) or hasattr(type(module), "walk_bounds"):
            for name, part in module.named_children():
                self.of(part, _join(path, name))
        made: nn.Module = copy.deepcopy(module, self._made)
        if getattr(made, "inplace", False):
            made.inplace = False  # type: ignore[assignment]
        return made

    def _note(self, path: str, text: str) -> None:
        self.changes.append(f"{f'layer {path!r}' if path else 'the model'}: {text}")

    def _replacement(self, module: nn.Module, path: str) -> tuple[nn.Module, str] | None:
        if type(module) is nn.Linear:
            return self._linear(module)
        if type(module) in _CONVOLUTIONS:
            return self._convolution(module)
        if isinstance(module, _ACTIVATIONS):
            made = self.activation(*self._widths[id(module)])
            return made, "it keeps the norm of gradients"
        if isinstance(module, _NORMALISATIONS):
            # What a normalisation holds (an activation, in timm) comes after it.
            held = [self.of(m, _join(path, name)) for name, m in module.named_children()]
            centred = nn.Sequential(LayerCentering(), *held) if held else LayerCentering()
            return centred, "dividing by a deviation has no Lipschitz constant"
        if isinstance(module, _DropoutNd) or type(module).__name__ in _STOCHASTIC_DEPTH:
            return nn.Identity(), "it adds noise to what is noisy enough"
        if type(module) is nn.AvgPool2d:
            pool = ScaledL2NormPool2d(module.kernel_size, module.stride)
            return pool, "an average shrinks what it averages"
        return None

    def _linear(self, module: nn.Linear) -> tuple[nn.Module, str]:
        cheap = orthogonalise_cost(*module.weight.shape) <= self.max_cost
        made = skip_init(
            SpectralLinear,
            module.in_features,
            module.out_features,
            within=Orthogonal if cheap else FrobeniusBall,
            device=module.weight.device,
            dtype=module.weight.dtype,
        )
        why = "its norm is bounded" if cheap else "its Frobenius norm is bounded, which is cheap"
        return self._with_weight(made, module), why

    def _convolution(self, module: Any) -> tuple[nn.Module, str]:
        shape = module.weight.shape
        grouped = (module.groups, shape[0] // module.groups, *shape[1:])
        cheap = torus_cost(grouped, axes_of(module)) <= self.max_cost
        make: Callable[..., Any] = _CONVOLUTIONS[type(module)]
        made = skip_init(
            make,
            module.in_channels,
            module.out_channels,
            module.kernel_size,
            module.stride,
            module.padding,
            module.dilation,
            module.groups,
            padding_mode=module.padding_mode,
            within=TrueConvolution if cheap and not self.reshaped else ReshapedKernel,
            device=module.weight.device,
            dtype=module.weight.dtype,
        )
        why = "its norm is bounded" if cheap else "its flattened matrix is bounded, which is cheap"
        return self._with_weight(made, module), why

    def _with_weight(self, made: Any, module: Any) -> nn.Module:
        weight = module.weight
        if id(weight) in self._made:
            made.weight = self._made[id(weight)]
        else:
            with torch.no_grad():
                made.weight.copy_(weight)
            made.weight.requires_grad_(weight.requires_grad)
            self._made[id(weight)] = made.weight
        layer: nn.Module = made
        return layer


def _widths(model: nn.Module) -> dict[int, tuple[int, int]]:
    """For each module, the channels of the layer that was registered before it, and their axis."""
    found: dict[int, tuple[int, int]] = {}
    width = (0, 1)
    for module in model.modules():
        found[id(module)] = width
        for name, axis in (("out_channels", 1), ("out_features", -1)):
            channels = getattr(module, name, None)
            if isinstance(channels, int):
                width = (channels, axis)
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode while it is traced, so that nothing random is in the graph."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _brief(module: nn.Module) -> str:
    text = " ".join(str(module).split())
    return text if len(text) <= 90 else f"{type(module).__name__}(…)"
