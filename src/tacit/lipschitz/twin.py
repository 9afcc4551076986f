"""Converts an ordinary feed-forward network into its Lipschitz twin.

The conversion goes down the tree of modules. Layers have counterparts, `nn.Sequential` keeps its
order, and any other module becomes a graph of its converted parts (`graph_module`). A part without
a twin is reported before a single weight is projected.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.utils import skip_init

from tacit.errors import Refused, UnboundedLayer
from tacit.lipschitz.integrity import gives_answers, joined, place, require_no_hooks
from tacit.lipschitz.layers.activations import Absolute, MaxMin
from tacit.lipschitz.layers.convolution_layers import (
    SpectralConv1d,
    SpectralConv2d,
    SpectralConv3d,
    axes_of,
)
from tacit.lipschitz.layers.limits import BoundedInput, LayerCentering
from tacit.lipschitz.layers.linear import SpectralLinear
from tacit.lipschitz.layers.rearranging import ScaledL2NormPool2d
from tacit.lipschitz.operator_norm import orthogonalise_cost, torus_cost
from tacit.lipschitz.program import compile_program
from tacit.lipschitz.projection import project
from tacit.lipschitz.sets import FrobeniusBall, Orthogonal, ReshapedKernel, TrueConvolution
from tacit.lipschitz.steps import evaluating
from tacit.lipschitz.torch_modules import KNOWN, REASONS
from tacit.lipschitz.tracing import (
    ADD,
    DIVIDE,
    MULTIPLY,
    SUBTRACT,
    drop_unread,
    functional_graph,
    name_of,
    part_of,
)
from tacit.torch_internals import Dropout, Normalisation

_CONVOLUTIONS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Conv1d: SpectralConv1d,
    nn.Conv2d: SpectralConv2d,
    nn.Conv3d: SpectralConv3d,
}
_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Softplus, nn.Hardswish, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid,
    nn.Softsign, nn.RReLU,
)  # fmt: skip
_NORMALISATIONS = (Normalisation, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# By name, because the libraries that define them may not be installed.
_STOCHASTIC_DEPTH = ("StochasticDepth", "DropPath")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Activation = Callable[[int, int], nn.Module]


class Twin(NamedTuple):
    """A model that the clipless route can train, and in words what was changed to make it one."""

    model: nn.Module
    changes: tuple[str, ...]


def norm_preserving(channels: int, axis: int) -> nn.Module:
    """MaxMin, or the absolute value for an odd number of channels."""
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
    Activations become `activation(channels, axis)`, by default MaxMin, or the absolute value for an
    odd number of channels; both keep the norms of gradients. Normalisation becomes centring over a
    record's own axes. Dropout and stochastic depth are removed. Average pooling, which shrinks its
    input, becomes L2-norm pooling. A module with a forward of its own becomes the graph that
    `torch.fx` traces of it in evaluation mode, without writes in place; there sums of two values
    become averages, and the module's own scales and biases (layer scale) are removed. Shared layers
    and weights stay shared. The twin computes a different function from the model: train it.

    Weights are certified in each step. `max_cost` limits the floating-point operations that this
    takes for one weight. A kernel above the limit is bounded by its flattened matrix, as every
    kernel is with `reshaped=True`, and a matrix by its Frobenius norm. Both keep weights smaller.

    Raises `UnboundedLayer` for a part that has no twin, by name and before any projection.

        twin, changes = tacit.lipschitz_twin(torchvision.models.resnet18(num_classes=10))
    """
    require_no_hooks(model)
    conversion = _Conversion(model, activation, reshaped, max_cost)
    with evaluating(model):
        body = conversion.of(model, "")
    conversion.require_complete(model)
    compile_program(body)
    twin = nn.Sequential(BoundedInput(input_norm, sphere=sphere), body)
    twin.train(model.training)
    project(twin)
    first = f"in front: {twin[0]}: the bound on the input is enforced"
    return Twin(twin, (first, *conversion.changes))


class _Conversion:
    """The modules converted so far, what was changed, and what has no twin."""

    def __init__(
        self, model: nn.Module, activation: Activation, reshaped: bool, max_cost: float
    ) -> None:
        self.activation, self.reshaped, self.max_cost = activation, reshaped, max_cost
        self.changes: list[str] = []
        self.refused: list[str] = []
        self._twins: dict[int, Any] = {}  # by the id of the original, as in deepcopy
        self._above: list[int] = []
        self._widths = _widths(model)

    def of(self, module: nn.Module, path: str) -> nn.Module:
        """The twin of a part. A part without one is recorded, and an identity stands in for it."""
        if id(module) in self._twins:
            known: nn.Module = self._twins[id(module)]
            return known
        inside_itself = id(module) in self._above
        self._above.append(id(module))
        try:
            if inside_itself:
                raise Refused("it contains itself")
            twin = self._converted(module, path)
        except Refused as refused:
            self.refused.append(f"{place(path, type(module))} has no Lipschitz twin: {refused}")
            twin = nn.Identity()
        finally:
            self._above.pop()
        self._twins[id(module)] = twin
        return twin

    def require_complete(self, model: nn.Module) -> None:
        """Refuse parts without a twin. Attention comes first: there is no other way to write it."""
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
            replacement = self._replacement(module, path)
            if replacement is not None:
                new, why = replacement
                self._note(path, f"{_brief(module)} → {_brief(new)}: {why}")
                return new
        if kind in REASONS:
            raise Refused(f"{kind.__name__} {REASONS[kind]}")
        if gives_answers(kind) or kind in KNOWN or kind in _CONTAINERS:
            return self._kept(module, path)
        if kind.forward is nn.Sequential.forward:
            # Not `named_children`, which leaves out a part that is there twice.
            children = ((name, m) for name, m in module._modules.items() if m is not None)
            parts = [(name, self.of(m, joined(path, name))) for name, m in children]
            return nn.Sequential(OrderedDict(parts))
        return graph_module(
            module,
            lambda name, part: self.of(part, joined(path, name)),
            lambda text: self._note(path, text),
        )

    def _kept(self, module: nn.Module, path: str) -> nn.Module:
        """A copy that does not write in place. The children are converted unless it answers."""
        if isinstance(module, _CONTAINERS) or hasattr(type(module), "walk_bounds"):
            for name, part in module.named_children():
                self.of(part, joined(path, name))
        kept: nn.Module = copy.deepcopy(module, self._twins)
        if getattr(kept, "inplace", False):
            kept.inplace = False  # type: ignore[assignment]
        return kept

    def _note(self, path: str, text: str) -> None:
        self.changes.append(f"{f'layer {path!r}' if path else 'the model'}: {text}")

    def _replacement(self, module: nn.Module, path: str) -> tuple[nn.Module, str] | None:
        if type(module) is nn.Linear:
            return self._linear(module)
        if type(module) in _CONVOLUTIONS:
            return self._convolution(module)
        if isinstance(module, _ACTIVATIONS):
            activation = self.activation(*self._widths[id(module)])
            return activation, "it keeps the norm of gradients"
        if isinstance(module, _NORMALISATIONS):
            # The children of a normalisation (an activation, in timm) come after it.
            after = [self.of(m, joined(path, name)) for name, m in module.named_children()]
            centred = nn.Sequential(LayerCentering(), *after) if after else LayerCentering()
            return centred, "dividing by a deviation has no Lipschitz constant"
        if isinstance(module, Dropout) or type(module).__name__ in _STOCHASTIC_DEPTH:
            return nn.Identity(), "private training adds noise enough"
        if type(module) is nn.AvgPool2d:
            pool = ScaledL2NormPool2d(module.kernel_size, module.stride)
            return pool, "an average shrinks its input"
        return None

    def _linear(self, module: nn.Linear) -> tuple[nn.Module, str]:
        cheap = orthogonalise_cost(*module.weight.shape) <= self.max_cost
        within = Orthogonal if cheap else FrobeniusBall
        sizes = (module.in_features, module.out_features)
        why = "its norm is bounded" if cheap else "its Frobenius norm is bounded, which is cheap"
        return self._with_weight(module, SpectralLinear, sizes, within=within), why

    def _convolution(self, module: Any) -> tuple[nn.Module, str]:
        shape = module.weight.shape
        grouped = (module.groups, shape[0] // module.groups, *shape[1:])
        cheap = torus_cost(grouped, axes_of(module)) <= self.max_cost
        within = TrueConvolution if cheap and not self.reshaped else ReshapedKernel
        names = "in_channels out_channels kernel_size stride padding dilation groups"
        settings = [getattr(module, name) for name in names.split()]
        how = {"padding_mode": module.padding_mode, "within": within}
        why = "its norm is bounded" if cheap else "its flattened matrix is bounded, which is cheap"
        return self._with_weight(module, _CONVOLUTIONS[type(module)], settings, **how), why

    def _with_weight(self, module: Any, kind: Any, settings: Any, **how: Any) -> nn.Module:
        """A layer of that kind with the module's weight, which shared layers go on sharing."""
        weight = module.weight
        new: Any = skip_init(kind, *settings, **how, device=weight.device, dtype=weight.dtype)
        if id(weight) in self._twins:
            new.weight = self._twins[id(weight)]
        else:
            with torch.no_grad():
                new.weight.copy_(weight)
            new.weight.requires_grad_(weight.requires_grad)
            self._twins[id(weight)] = new.weight
        layer: nn.Module = new
        return layer


def _widths(model: nn.Module) -> dict[int, tuple[int, int]]:
    """For each module, the channels of the layer registered before it, and their axis."""
    widths: dict[int, tuple[int, int]] = {}
    width = (0, 1)
    for module in model.modules():
        widths[id(module)] = width
        for name, axis in (("out_channels", 1), ("out_features", -1)):
            channels = getattr(module, name, None)
            if isinstance(channels, int):
                width = (channels, axis)
    return widths


def _brief(module: nn.Module) -> str:
    text = " ".join(str(module).split())
    return text if len(text) <= 120 else f"{type(module).__name__}(…)"


def graph_module(
    module: nn.Module,
    convert: Callable[[str, nn.Module], nn.Module],
    note: Callable[[str], None],
) -> fx.GraphModule:
    """A module of the converted parts, whose forward is the traced graph with these changes.

    u + αv → (u + αv)/(1 + |α|), so that a sum is no longer than the longer of its terms and its
             Lipschitz constant is at most that of the steeper one. A plain residual block is
             (1 + L)-Lipschitz, and bounds would double with each block.
    γ·u, u + β with parameters γ, β of the module itself → u. Layer scale begins near 0, where the
             branch behind it would get no gradient and all of the noise; the average above does
             its work. Biases are removed, as those of layers are.
    u.reshape(len(u), −1) → flatten(1), which cannot reach across records.

    `convert(path, part)` gives the part that takes a part's place, and `note` takes a description
    of each change. An operation without a bound is refused by name.
    """
    graph = functional_graph(module, defaults=True)
    parts: dict[str, nn.Module] = {}
    fixed: dict[fx.Node, set[str]] = {}  # computed from parameters alone, and from which
    for node in list(graph.nodes):
        sources = node.all_input_nodes
        if node.op == "get_attr":
            fixed[node] = {str(node.target)}
        elif node.op == "call_module":
            target = str(node.target)
            if len(sources) != 1 or sources[0] in fixed or node.args != (sources[0],):
                raise Refused(f"its forward gives {target!r} something other than one value")
            if target not in parts:
                parts[target] = convert(target, part_of(module, target))
            node.kwargs = {}
        elif node.op in ("call_function", "call_method") and sources:
            doubled = len(node.args) == 2 and node.args[0] is node.args[1]  # u + u has one source
            if all(source in fixed for source in sources):
                fixed[node] = set().union(*(fixed[source] for source in sources))
            elif any(source in fixed for source in sources):
                _drop_parameters(module, node, fixed, note)
            elif node.target in (torch.reshape, "reshape", "view"):
                _flatten(graph, node)
            elif node.target in (*ADD, *SUBTRACT) and len(sources) + doubled == 2:
                _average(graph, node, note)
    drop_unread(graph, fixed)
    graph.lint()
    return fx.GraphModule(parts, graph, type(module).__name__)


def _average(graph: fx.Graph, node: fx.Node, note: Callable[[str], None]) -> None:
    alpha = node.kwargs.get("alpha", 1)
    if not isinstance(alpha, int | float):
        raise Refused(f"its forward uses {name_of(node.target)} with alpha={alpha}")
    share = 1 / (1 + abs(alpha))
    with graph.inserting_after(node):
        scaled = graph.call_function(operator.mul, (node, share))
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    note(f"{node.name} → its average: sums would double the bounds each time")


def _drop_parameters(
    module: nn.Module, node: fx.Node, fixed: dict[fx.Node, set[str]], note: Callable[[str], None]
) -> None:
    values = [source for source in node.all_input_nodes if source not in fixed]
    used = sorted(set().union(*(fixed.get(source, set()) for source in node.all_input_nodes)))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in used:
        if name not in parameters:
            raise Refused(
                f"its forward uses the tensor {name!r}, which is no parameter; put it into a layer "
                "that answers for it"
            )
    names = ", ".join(used)
    first = node.args[0] if node.args else None
    known = (
        node.target in (*ADD, *MULTIPLY, torch.addcmul, "addcmul")
        or (node.target in (*SUBTRACT, *DIVIDE) and first is values[0])
    ) and len(values) == 1
    if not known:
        raise Refused(
            f"its forward uses the tensor {names} in {name_of(node.target)}, which has no bound; "
            "put it into a layer that answers for it, such as tacit.lipschitz.SpectralLinear or "
            "AddBias"
        )
    node.replace_all_uses_with(values[0])
    node.graph.erase_node(node)
    note(f"{names} removed: scales and biases of single channels cost noise")


def _flatten(graph: fx.Graph, node: fx.Node) -> None:
    """u.reshape(u.shape[0], −1) and the like; other shapes are refused when the graph is read."""
    source, *sizes = node.args
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = list(sizes[0])
    if len(sizes) != 2 or sizes[1] != -1 or not _is_batch_size(sizes[0]):
        return
    with graph.inserting_before(node):
        flat = graph.call_function(torch.flatten, (source, 1))
    node.replace_all_uses_with(flat)
    graph.erase_node(node)


def _is_batch_size(size: Any) -> bool:
    if not isinstance(size, fx.Node):
        return False
    if size.target == "size":
        return size.args[1:] == (0,)
    if size.target is not operator.getitem or size.args[1] != 0:
        return False
    shape = size.args[0]
    if not isinstance(shape, fx.Node):
        return False
    return shape.target == "size" or (shape.target is getattr and shape.args[1] == "shape")
