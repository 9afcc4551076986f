"""What a forward computes: a `torch.fx` graph without writes in place, and a module per operation.

`u += v`, `u.mul_(2)` and `relu(u, inplace=True)` write into u. The trace records the operation that
returns a new value, and from then on every Python name of u stands for that value, as in PyTorch. A
view of u, or u under the name of a module that returned it, is another name that the trace cannot
follow. Reading one after a write is refused, and so is a write into the input, which the caller may
read. So the graph computes what forward does.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, Layer, own_axes, own_axis, per_axis
from tacit.lipschitz.integrity import require_no_hidden_code
from tacit.lipschitz.layers.limits import Scale
from tacit.lipschitz.layers.rearranging import Permute
from tacit.torch_internals import Dropout, traced_assertion

ADD = (operator.add, torch.add, "add")
SUBTRACT = (operator.sub, torch.sub, "sub")
MULTIPLY = (operator.mul, torch.mul, "mul")
DIVIDE = (operator.truediv, torch.div, "div")
# Operations that may return a view of their input.
_VIEWS = frozenset([
    "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "getitem",
    "movedim", "narrow", "permute", "ravel", "reshape", "select", "split", "squeeze", "swapaxes",
    "t", "to", "transpose", "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view",
    "view_as",
])  # fmt: skip
# Modules of PyTorch that may return their input, or a view of it.
_RETURN_VIEWS = (nn.Identity, nn.Flatten, nn.Unflatten, Dropout)


def functional_graph(module: nn.Module, *, defaults: bool = False) -> fx.Graph:
    """The graph of a module's forward, one level deep: its parts are called and not traced.

    Forward takes one input. With `defaults` it may take others, which keep their default values.
    Assertions, and shapes that nothing reads, are left out.
    """
    if "forward" in vars(module):
        require_no_hidden_code(module, type(module))
    _require_one_input(module, defaults)
    tracer = _Tracer()
    try:
        graph = tracer.trace(module)
    except Refused:
        raise
    except Exception as error:
        raise Refused(
            f"its forward cannot be followed ({error}); it must not depend on the values or the "
            "number of records: give it the three answers of tacit.lipschitz.Bounded"
        ) from error
    for before, after in tracer.writes:
        _require_no_other_name(module, graph, before, after)
    drop_unread(graph)
    return graph


def drop_unread(graph: fx.Graph, also: Container[fx.Node] = ()) -> None:
    """Erase assertions, shapes and arithmetic that nothing reads, and nodes of `also`.

    An operation that may do more than return a value stays, and needs a bound.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and (_only_returns(node) or node in also):
            graph.erase_node(node)


def _only_returns(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    known = node.op == "get_attr" or node.target in (getattr, traced_assertion)
    # Python's own operators.
    return known or getattr(node.target, "__module__", "") == operator.add.__module__


def part_of(module: nn.Module, target: str) -> nn.Module:
    """The submodule at that path, from PyTorch's tables of children."""
    for name in target.split("."):
        part = module._modules.get(name)
        if not isinstance(part, nn.Module):
            raise Refused(f"its forward calls {target!r}, which is not one of its modules")
        module = part
    return module


def name_of(target: Any) -> str:
    return f".{target}()" if isinstance(target, str) else getattr(target, "__name__", str(target))


def _require_one_input(module: nn.Module, defaults: bool) -> None:
    inputs = list(inspect.signature(module.forward).parameters.values())
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    known = bool(inputs) and inputs[0].kind is positional
    others = [i for i in inputs[1:] if not defaults or i.default is inspect.Parameter.empty]
    if not known or others:
        raise Refused(
            "it has neither the three answers of tacit.lipschitz.Bounded nor a forward of one "
            "input to follow; use its counterpart in tacit.lipschitz, let "
            "tacit.lipschitz_twin(model) replace it, or train this model with PerSampleClip"
        )


class _Value(fx.Proxy):
    """A value while forward is traced."""


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[_Value, Any], _Value]:
    def write(self: _Value, other: Any) -> _Value:
        tracer: Any = self.tracer
        written: _Value = tracer.write(self, function(self, other))
        return written

    return write


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(_Value, f"__i{_name}__", _in_place(getattr(operator, _name)))
for _name in ("and", "or"):
    setattr(_Value, f"__i{_name}__", _in_place(getattr(operator, f"{_name}_")))


def _forward_codes(function: Any) -> Iterator[CodeType]:
    """The code of `forward` of an autograd Function and of all its subclasses."""
    if hasattr(function.forward, "__code__"):
        yield function.forward.__code__
    for subclass in function.__subclasses__():
        yield from _forward_codes(subclass)


class _Tracer(fx.Tracer):
    """Records writes in place as new values. `writes` has the nodes before and after each."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[fx.Node, fx.Node]] = []
        self._functions = set(_forward_codes(torch.autograd.Function))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        name = next(iter(inspect.signature(self.root.forward).parameters))
        return root_fn, [self.root, self.create_proxy("placeholder", name, (), {})]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code in self._functions:
                raise Refused(
                    "its forward uses an autograd Function, whose backward no trace records; "
                    "give it the three answers of tacit.lipschitz.Bounded"
                )
            frame = frame.f_back
        return _Value(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            raise Refused("its forward uses a tensor that is not one of its parameters")
        return super().create_arg(a)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: dict[str, Any], *more: Any, **named: Any
    ) -> Any:
        value = args[0] if args and isinstance(args[0], _Value) else None
        if value is None:
            return super().create_proxy(kind, target, args, kwargs, *more, **named)
        by_flag = kwargs.get("inplace") is True
        by_method = kind == "call_method" and _writes(target)
        # A layer that writes into its input stays one, and its answers allow for that; so does an
        # activation on the input of the whole module.
        stays = by_flag and value.node.op == "placeholder"
        if kind == "call_module":
            stays = getattr(part_of(self.root, target), "inplace", False) is True
        elif by_flag and not stays:
            kwargs = {**kwargs, "inplace": False}
        elif by_method:
            target = target.removesuffix("_")
        result: Any = super().create_proxy(kind, target, args, kwargs, *more, **named)
        if stays:
            value.node = result.node
            return value
        return self.write(value, result) if by_flag or by_method else result

    def write(self, value: _Value, written: _Value) -> _Value:
        """From now on, every name of the value stands for the new one."""
        if value.node.op in ("placeholder", "get_attr"):
            raise Refused(
                f"its forward writes into {value.node.target!r}, which others may read; write "
                "x = x + y for x += y"
            )
        self.writes.append((value.node, written.node))
        value.node = written.node
        return value


def _writes(method: str) -> bool:
    """Whether PyTorch's method of this name writes in place: `add_`, and not `__add__`."""
    return method.endswith("_") and not method.endswith("__")


def _require_no_other_name(
    module: nn.Module, graph: fx.Graph, before: fx.Node, after: fx.Node
) -> None:
    """Refuse a write into `before` if a later line reads the same memory by another name."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    names, waiting = {before}, [before]
    while waiting:
        node = waiting.pop()
        near = [user for user in node.users if _may_return(module, user, node)]
        near += [source for source in node.all_input_nodes if _may_return(module, node, source)]
        fresh = [n for n in near if n not in names and place[n] < place[after]]
        names.update(fresh)
        waiting += fresh
    for node in names:
        if node.op == "placeholder":
            raise Refused(
                f"its forward writes into {before.name!r}, which may be its own input; write "
                "x = x + y for x += y"
            )
        late = [user for user in node.users if place[user] > place[after]]
        if late:
            raise Refused(
                f"its forward writes into {before.name!r} and reads it by another name in "
                f"{late[0].name!r}; write x = x + y for x += y"
            )


def _may_return(module: nn.Module, node: fx.Node, source: fx.Node) -> bool:
    """Whether the value of a node may be its first argument, or a view of it."""
    if not node.args or node.args[0] is not source:
        return False
    if node.op == "call_module":
        part = part_of(module, str(node.target))
        if next(part.parameters(), None) is not None:
            return False
        return isinstance(part, _RETURN_VIEWS) or not type(part).__module__.startswith("torch.nn.")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _VIEWS


# ---- operations, as modules with the three answers -----------------------------------------------


class Mean(Layer):
    """The mean of m of a record's own numbers: |mean| ≤ ‖·‖/√m by Cauchy–Schwarz, so 1/√m."""

    def __init__(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> None:
        super().__init__()
        if dim is None or (not isinstance(dim, int) and not len(dim)):
            raise Refused("a mean over everything mixes records; name a record's own axes")
        self.axes = per_axis(dim, 1)
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=own_axes(self.axes, x.dim(), "a mean"), keepdim=self.keepdim)

    def lipschitz(self, x: Bound) -> float:
        axes = own_axes(self.axes, len(x.shape) + 1, "a mean")
        return 1 / math.sqrt(math.prod(x.shape[axis - 1] for axis in axes))


class AddNumber(Layer):
    """x + c, the same number c added to all n entries: X + |c|·√n, 1-Lipschitz."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = float(by)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by

    def output_norm(self, x: Bound) -> float:
        return x.norm + abs(self.by) * math.sqrt(math.prod(x.shape))


class Part(Layer):
    """x[:, …] with numbers and slices: a part of each record, no entry twice."""

    exact = True

    def __init__(self, index: Any) -> None:
        super().__init__()
        self.index = index if isinstance(index, tuple) else (index,)
        if self.index[0] != slice(None) or not all(map(_is_basic, self.index)):
            raise Refused(
                f"x[{index}] chooses among records, or by a tensor; begin with a full slice, "
                "x[:, …], followed by numbers and slices"
            )

    def forward(self, x: Tensor) -> Tensor:
        return x[self.index]


def _is_basic(index: Any) -> bool:
    if isinstance(index, slice):
        return all(end is None or type(end) is int for end in (index.start, index.stop, index.step))
    # A bool is an int to Python and a mask to PyTorch.
    return index is None or index is Ellipsis or type(index) is int


class Exchange(Layer):
    """Exchanges two of a record's own axes."""

    exact = True

    def __init__(self, dim0: int, dim1: int) -> None:
        super().__init__()
        self.axes = (dim0, dim1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (own_axis(axis, x.dim(), "a transposition") for axis in self.axes)
        return x.transpose(first, second)


def operation(node: fx.Node) -> tuple[nn.Module, Any]:
    """The module that does what an operation does to one value, and that value."""
    target = node.target
    if target in (*ADD, *SUBTRACT):
        return _plus_number(node)
    if target in (*MULTIPLY, *DIVIDE):
        return _times_number(node)
    if target not in OPERATIONS:
        raise Refused(
            f"its forward uses {name_of(target)}, which has no bound; use +, -, scaling by a "
            "number, torch.cat, flatten(1), mean over a record's own axes, PyTorch's activations "
            "and poolings and Tacit's layers, or give the module the three answers of "
            "tacit.lipschitz.Bounded"
        )
    make, names = OPERATIONS[target]
    value, *args = node.args or (None,)
    kwargs = node.kwargs
    if target == "permute" and args and isinstance(args[0], int):
        args = [tuple(args)]
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    for name, default in _WITHOUT_EFFECT.items():
        if name in given and given[name] == default:
            del given[name]
    if len(args) > len(names) or not set(given) <= set(names):
        raise Refused(f"its forward uses {name_of(target)} with arguments {tuple(args)}, {kwargs}")
    if any(isinstance(argument, fx.Node) for argument in given.values()):
        raise Refused(
            f"its forward uses {name_of(target)} with an argument that depends on its input; make "
            "it a constant"
        )
    try:
        return make(**given), value
    except (TypeError, ValueError) as error:
        raise Refused(f"its forward uses {name_of(target)}: {error}") from error


def summands(node: fx.Node) -> tuple[Any, Any, float]:
    """u, v and α of u + αv; −α of u − αv."""
    u, v = _operands(node)
    alpha = _number(node.kwargs.get("alpha", 1), node)
    return u, v, -alpha if node.target in SUBTRACT else alpha


def _plus_number(node: fx.Node) -> tuple[nn.Module, Any]:
    """factor·u + number."""
    u, v, alpha = summands(node)
    if not isinstance(v, fx.Node):
        return AddNumber(alpha * _number(v, node)), u
    added = AddNumber(_number(u, node))
    return added if alpha == 1 else nn.Sequential(_scaling(alpha), added), v


def _times_number(node: fx.Node) -> tuple[nn.Module, Any]:
    a, b = _operands(node)
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        raise Refused(
            f"its forward uses {name_of(node.target)} on two values; their product grows with "
            "the square of the input and has no Lipschitz constant"
        )
    value, by = (a, b) if isinstance(a, fx.Node) else (b, a)
    factor = _number(by, node)
    if node.target in DIVIDE:
        if value is b or factor == 0:
            raise Refused(f"its forward divides {a} by {b}; divide by a number other than 0")
        factor = 1 / factor
    return _scaling(factor), value


def _scaling(factor: float) -> nn.Module:
    if factor == 0 or not math.isfinite(factor):
        raise Refused(f"its forward multiplies by {factor}")
    return Scale(factor)


def _operands(node: fx.Node) -> tuple[Any, Any]:
    if len(node.args) != 2 or not node.kwargs.keys() <= {"alpha"}:
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


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
    return nn.Dropout(p, inplace).train(training)


def _permute(dims: tuple[int, ...]) -> nn.Module:
    if not dims or dims[0] != 0:
        raise Refused(f"permute{tuple(dims)} moves the batch axis; keep 0 first")
    return Permute(*dims[1:])


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
    (partial(nn.Flatten, start_dim=0), "start_dim end_dim", torch.flatten, "flatten"),
    (Mean, "dim keepdim", torch.mean, "mean"),
    (Exchange, "dim0 dim1", torch.transpose, "transpose"),
    (_permute, "dims", torch.permute, "permute"),
    (nn.Identity, "", "contiguous"),
    (Part, "index", operator.getitem),
    (partial(Scale, -1.0), "", operator.neg, torch.neg, "neg"),
]
OPERATIONS: dict[Any, tuple[Callable[..., nn.Module], list[str]]] = {
    target: (make, names.split()) for make, names, *targets in _TABLE for target in targets
}
