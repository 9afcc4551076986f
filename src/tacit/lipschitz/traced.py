"""A module with a forward of its own, as a graph of steps that is bounded and run.

`torch.fx` records forward for the module's present mode and settings. The graph takes its place:
  u + v        ‖u + v‖ ≤ U + V, and both get the cotangent G
  cat(u, v)    (U² + V²)^(1/2), and both get at most G
  f(u)         by f's three answers
What runs for an operation is the module that `OPERATIONS` names, or the layer that answers for it,
never the function that forward called. Everything else has no bound: products of activations,
indexing among records, anything along the batch axis.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, Parameterless, own_axes, own_axis
from tacit.lipschitz.layers.branches import concatenated
from tacit.lipschitz.layers.limits import Scale
from tacit.lipschitz.layers.rearranging import Permute
from tacit.lipschitz.steps import GraphStep, Line, Notes, Step, step_line
from tacit.lipschitz.tracing import (
    ADD,
    DIVIDE,
    MULTIPLY,
    SUBTRACT,
    functional_graph,
    name_of,
    part_of,
)

_CONCATENATE = (torch.cat, torch.concat, torch.concatenate)


def trace(module: nn.Module, path: str, child: Callable[[str, nn.Module], Step]) -> GraphStep:
    """The graph of a module's forward; `child(name, m)` compiles one of its parts."""
    nodes = list(functional_graph(module).nodes)
    output = nodes[-1].args[0]
    if not isinstance(output, fx.Node):
        raise Refused("its forward does not return one tensor")
    translation = _Translation(module, child, nodes[0])
    for node in nodes[1:-1]:
        translation.append(node)
    lines, numbers = translation.lines, translation.numbers
    return GraphStep(path, type(module), lines, numbers[output])


class _Translation:
    """Translates nodes of `torch.fx` into lines. `numbers` holds the value of each node."""

    def __init__(
        self, module: nn.Module, child: Callable[[str, nn.Module], Step], entry: fx.Node
    ) -> None:
        self.module, self.child = module, child
        self.numbers: dict[fx.Node, int] = {entry: 0}
        self.lines: list[Line] = []

    def append(self, node: fx.Node) -> None:
        self.lines.append(self._line(node))
        self.numbers[node] = len(self.lines)

    def _line(self, node: fx.Node) -> Line:
        target = node.target
        source = node.args[0] if node.args else None
        if node.op == "get_attr":
            raise Refused(
                f"its forward uses the tensor {target!r} by itself; put it into a layer that "
                "answers for it, such as tacit.lipschitz.AddBias"
            )
        if node.op == "call_module":
            assert isinstance(target, str)
            if len(node.args) != 1 or node.kwargs:
                source = None
            return self._through(source, target, part_of(self.module, target))
        if target in (*ADD, *SUBTRACT):
            return self._add(node)
        if target in (*MULTIPLY, *DIVIDE):
            return self._scale(node)
        if target in _CONCATENATE:
            return self._concatenate(node)
        return self._through(source, node.name, module_for(target, node.args[1:], node.kwargs))

    def _through(self, source: Any, name: str, part: nn.Module) -> Line:
        """One value through one module, compiled like a layer, with plain numbers for settings."""
        step = self.child(name, part)
        if not isinstance(source, fx.Node):
            raise Refused(f"its forward gives {name!r} something other than one value")
        return step_line(self.numbers[source], step)

    def _add(self, node: fx.Node) -> Line:
        """u + αv, and factor·u + number where one of them is a number."""
        a, b = _two(node)
        alpha = _number(node.kwargs.get("alpha", 1), node)
        alpha = -alpha if node.target in SUBTRACT else alpha
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            return self._add_values(node, a, b, alpha)
        if isinstance(a, fx.Node):
            return self._through(a, node.name, AddNumber(alpha * _number(b, node)))
        added: nn.Module = AddNumber(_number(a, node))
        made = added if alpha == 1 else nn.Sequential(_scaling(alpha), added)
        return self._through(b, node.name, made)

    def _add_values(self, node: fx.Node, a: fx.Node, b: fx.Node, alpha: float) -> Line:
        total = self.child(node.name, AddNumber(0.0))  # for the rounding of the sum; it never runs

        def walk(bounds: list[Bound], notes: Notes) -> Any:
            left, right = bounds
            if left.shape != right.shape:
                raise Refused(
                    f"its forward adds records of shapes {left.shape} and {right.shape}; "
                    "broadcasting copies numbers and is not followed, so make the shapes agree"
                )
            norm = left.norm + abs(alpha) * right.norm
            out, back = total.walk(Bound(norm, left.shape), notes)

            def shares(cotangent: float) -> tuple[float, float]:
                arriving = back(cotangent)
                return arriving, abs(alpha) * arriving

            return out, shares

        def run(u: Tensor, v: Tensor) -> Tensor:
            return u + v if alpha == 1 else torch.add(u, v, alpha=alpha)

        return Line((self.numbers[a], self.numbers[b]), run, walk, total)

    def _scale(self, node: fx.Node) -> Line:
        a, b = _two(node)
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            raise Refused(
                f"its forward uses {name_of(node.target)} on two values; their product grows with "
                "the square of the input and has no Lipschitz constant"
            )
        source, by = (a, b) if isinstance(a, fx.Node) else (b, a)
        factor = _number(by, node)
        if node.target in DIVIDE:
            if source is b or factor == 0:
                raise Refused(f"its forward divides {a} by {b}; divide by a number other than 0")
            factor = 1 / factor
        return self._through(source, node.name, _scaling(factor))

    def _concatenate(self, node: fx.Node) -> Line:
        parts: Any = node.args[0] if node.args else node.kwargs.get("tensors")
        axis: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        known = len(node.args) <= 2 and set(node.kwargs) <= {"tensors", "dim"}
        known = known and type(axis) is int
        if not known or not all(isinstance(part, fx.Node) for part in parts):
            raise Refused(f"its forward uses {name_of(node.target)} on more than its own values")
        sources = tuple(self.numbers[part] for part in parts)

        def walk(bounds: list[Bound], notes: Notes) -> Any:
            shape = concatenated([bound.shape for bound in bounds], axis)
            norm = math.hypot(*(bound.norm for bound in bounds))
            return Bound(norm, shape), lambda cotangent: (cotangent,) * len(sources)

        return Line(sources, lambda *values: torch.cat(values, dim=axis), walk)


def _scaling(factor: float) -> nn.Module:
    if factor == 0 or not math.isfinite(factor):
        raise Refused(f"its forward multiplies by {factor}")
    return Scale(factor)


def _two(node: fx.Node) -> tuple[Any, Any]:
    if len(node.args) != 2 or not set(node.kwargs) <= {"alpha"}:
        raise Refused(
            f"its forward uses {name_of(node.target)} with arguments {node.args}, {node.kwargs}"
        )
    return node.args[0], node.args[1]


def _number(value: Any, node: fx.Node) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Refused(
            f"its forward uses {name_of(node.target)} with {value!r}, which is not a finite number"
        )
    return float(value)


# ---- operations, as modules with the three answers -----------------------------------------------


class Mean(nn.Module, Parameterless):
    """The mean of m of a record's own numbers: |mean| ≤ ‖·‖/√m by Cauchy–Schwarz, so 1/√m."""

    def __init__(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> None:
        super().__init__()
        if dim is None or (not isinstance(dim, int) and not len(dim)):
            raise Refused("a mean over everything mixes records; name a record's own axes")
        self.axes = (dim,) if isinstance(dim, int) else tuple(dim)
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=own_axes(self.axes, x.dim(), "a mean"), keepdim=self.keepdim)

    def lipschitz(self, x: Bound) -> float:
        axes = own_axes(self.axes, len(x.shape) + 1, "a mean")
        return 1 / math.sqrt(math.prod(x.shape[axis - 1] for axis in axes))


class AddNumber(nn.Module, Parameterless):
    """x + c, the same number c added to all n entries: X + |c|·√n, 1-Lipschitz."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = float(by)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by

    def output_norm(self, x: Bound) -> float:
        return x.norm + abs(self.by) * math.sqrt(math.prod(x.shape))


class Part(nn.Module, Parameterless):
    """x[:, …] with numbers and slices: a part of each record, no entry twice."""

    exact = True

    def __init__(self, index: Any) -> None:
        super().__init__()
        self.index = index if isinstance(index, tuple) else (index,)
        if self.index[0] != slice(None) or not all(map(_is_basic, self.index)):
            raise Refused(
                f"x[{index}] chooses among records, or by a tensor; begin with a full slice, "
                "x[:, …], and go on with numbers and slices"
            )

    def forward(self, x: Tensor) -> Tensor:
        return x[self.index]


def _is_basic(index: Any) -> bool:
    if isinstance(index, slice):
        return all(end is None or type(end) is int for end in (index.start, index.stop, index.step))
    # A bool is an int to Python and a mask to PyTorch.
    return index is None or index is Ellipsis or type(index) is int


class Exchange(nn.Module, Parameterless):
    """Exchanges two of a record's own axes."""

    exact = True

    def __init__(self, dim0: int, dim1: int) -> None:
        super().__init__()
        self.axes = (dim0, dim1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (own_axis(axis, x.dim(), "a transposition") for axis in self.axes)
        return x.transpose(first, second)


def module_for(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """The module that does what the operation does to one value; `args` come after that value."""
    if target not in OPERATIONS:
        raise Refused(
            f"its forward uses {name_of(target)}, which has no bound; use +, -, scaling by a "
            "number, torch.cat, flatten(1), mean over a record's own axes, PyTorch's activations "
            "and poolings and Tacit's layers, or give the module the three answers of "
            "tacit.lipschitz.Bounded"
        )
    make, names = OPERATIONS[target]
    if target == "permute" and args and isinstance(args[0], int):
        args = (args,)
    given = dict(zip(names, args, strict=False)) | kwargs
    for name, default in _WITHOUT_EFFECT.items():
        if name in given and given[name] == default:
            del given[name]
    if len(args) > len(names) or not set(given) <= set(names):
        raise Refused(f"its forward uses {name_of(target)} with arguments {args}, {kwargs}")
    if any(isinstance(value, fx.Node) for value in given.values()):
        raise Refused(
            f"its forward uses {name_of(target)} with an argument that depends on its input; make "
            "it a constant"
        )
    try:
        return make(**given)
    except Refused:
        raise
    except (TypeError, ValueError) as error:
        raise Refused(f"its forward uses {name_of(target)}: {error}") from error


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
    return nn.Dropout(p, inplace).train(training)


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    return nn.Flatten(start_dim, end_dim)


def _permute(dims: tuple[int, ...]) -> nn.Module:
    if not dims or dims[0] != 0:
        raise Refused(f"permute{tuple(dims)} moves the batch axis; keep 0 first")
    return Permute(*dims[1:])


def _negative() -> nn.Module:
    return Scale(-1.0)


# Arguments that have no effect at these values.
_WITHOUT_EFFECT: dict[str, Any] = {"_stacklevel": 3, "dtype": None}
_AVERAGE = "kernel_size stride padding ceil_mode count_include_pad"
_MAXIMUM = "kernel_size stride padding dilation ceil_mode return_indices"

# The module; the names of the arguments after the input, in the order of the *function*, which is
# not always the module's; the functions and methods.
_TABLE: list[tuple[Any, ...]] = [
    (nn.ReLU, "inplace", F.relu),
    (nn.ReLU, "", torch.relu, "relu"),
    (nn.ReLU6, "inplace", F.relu6),
    (nn.LeakyReLU, "negative_slope inplace", F.leaky_relu),
    (nn.ELU, "alpha inplace", F.elu),
    (nn.CELU, "alpha inplace", F.celu),
    (nn.SELU, "inplace", F.selu),
    (nn.GELU, "approximate", F.gelu),
    (nn.SiLU, "inplace", F.silu),
    (nn.Mish, "inplace", F.mish),
    (nn.Hardswish, "inplace", F.hardswish),
    (nn.Softplus, "beta threshold", F.softplus),
    (nn.LogSigmoid, "", F.logsigmoid),
    (nn.Sigmoid, "", torch.sigmoid, "sigmoid"),
    (nn.Hardsigmoid, "inplace", F.hardsigmoid),
    (nn.Tanh, "", torch.tanh, "tanh"),
    (nn.Hardtanh, "min_val max_val inplace", F.hardtanh),
    (nn.Softsign, "", F.softsign),
    (nn.Tanhshrink, "", F.tanhshrink),
    (nn.Softshrink, "lambd", F.softshrink),
    (nn.Softmax, "dim", F.softmax, torch.softmax, "softmax"),
    (nn.LogSoftmax, "dim", F.log_softmax, torch.log_softmax, "log_softmax"),
    (_dropout, "p training inplace", F.dropout),
    (nn.AvgPool1d, _AVERAGE, F.avg_pool1d),
    (nn.AvgPool2d, f"{_AVERAGE} divisor_override", F.avg_pool2d),
    (nn.AvgPool3d, f"{_AVERAGE} divisor_override", F.avg_pool3d),
    (nn.AdaptiveAvgPool1d, "output_size", F.adaptive_avg_pool1d),
    (nn.AdaptiveAvgPool2d, "output_size", F.adaptive_avg_pool2d),
    (nn.AdaptiveAvgPool3d, "output_size", F.adaptive_avg_pool3d),
    (nn.MaxPool1d, _MAXIMUM, F.max_pool1d),
    (nn.MaxPool2d, _MAXIMUM, F.max_pool2d),
    (nn.MaxPool3d, _MAXIMUM, F.max_pool3d),
    (nn.PixelShuffle, "upscale_factor", F.pixel_shuffle),
    (nn.PixelUnshuffle, "downscale_factor", F.pixel_unshuffle),
    (_flatten, "start_dim end_dim", torch.flatten, "flatten"),
    (Mean, "dim keepdim", torch.mean, "mean"),
    (Exchange, "dim0 dim1", torch.transpose, "transpose"),
    (_permute, "dims", torch.permute, "permute"),
    (nn.Identity, "", "contiguous"),
    (Part, "index", operator.getitem),
    (_negative, "", operator.neg, torch.neg, "neg"),
]
OPERATIONS: dict[Any, tuple[Callable[..., nn.Module], list[str]]] = {
    target: (make, names.split()) for make, names, *targets in _TABLE for target in targets
}
