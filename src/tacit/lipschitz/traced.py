"""Bounds of a module that has a forward of its own, by following that forward.

`torch.fx` writes down what forward does, for the module's present mode and settings. Each value is
bounded from the values it is made of; backwards, a value's cotangent is the sum of what its uses
send back:
  u + v        ‖u + v‖ ≤ U + V, and both get the cotangent G
  cat(u, v)    (U² + V²)^(1/2), and both get at most G
  f(u)         by f's three answers
Only what is known to keep records apart is let through. `fx` sees neither in-place arithmetic nor
the way back of an autograd Function, so two random records must come out of the trace as out of the
module, and a random cotangent must come back alike, to the input and to each parameter. A forward
that draws numbers outside PyTorch, or changes with each call, is beyond this.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from tacit.lipschitz.bounds import Bound, Pullback
from tacit.lipschitz.layers.branches import concatenated
from tacit.lipschitz.layers.scaling import Scale
from tacit.lipschitz.refused import Refused
from tacit.lipschitz.traced_operations import module_for, name_of
from tacit.lipschitz.traced_parts import AddNumber, Total

WalkModule = Callable[[nn.Module, str, Bound], tuple[Bound, Pullback]]

_ADD = {operator.add: 1, torch.add: 1, "add": 1, operator.sub: -1, torch.sub: -1, "sub": -1}
_MULTIPLY = (operator.mul, torch.mul, "mul")
_DIVIDE = (operator.truediv, torch.div, "div")
_CONCATENATE = (torch.cat, torch.concat, torch.concatenate)


def walk_trace(module: nn.Module, path: str, x: Bound, walk: WalkModule) -> tuple[Bound, Pullback]:
    """Send a bound through a module's forward; `walk` sends it through one of its parts."""
    graph = _trace(module)
    nodes = list(graph.nodes)
    entrance, exit_ = nodes[0], nodes[-1].args[0]
    if not isinstance(exit_, fx.Node):
        raise Refused("its forward does not return one tensor")
    follower = _Follower(module, path, walk, {entrance: x})
    steps = [(node, follower.step(node)) for node in nodes[1:-1]]
    _require_agreement(module, graph, x.shape)

    def pull(cotangent: float) -> float:
        arriving: dict[fx.Node, float] = defaultdict(float)
        arriving[exit_] = cotangent
        for node, step in reversed(steps):
            shares = step.shares(arriving[node])
            for source, share in zip(step.sources, shares, strict=True):
                arriving[source] += share
        return arriving[entrance]

    return follower.bounds[exit_], pull


@dataclass(frozen=True)
class _Step:
    """What one value is made of, and how a cotangent at it is passed on to them."""

    sources: tuple[fx.Node, ...]
    shares: Callable[[float], tuple[float, ...]]


@dataclass
class _Follower:
    module: nn.Module
    path: str
    walk: WalkModule
    bounds: dict[fx.Node, Bound]

    def step(self, node: fx.Node) -> _Step:
        target = node.target
        if node.op == "call_module":
            assert isinstance(target, str)
            return self._through(node, self.module.get_submodule(target), target)
        if node.op == "get_attr":
            raise Refused(
                f"its forward uses the tensor {target!r} by itself; put it into a layer that "
                "answers for it, such as tacit.lipschitz.AddBias"
            )
        if target in _ADD:
            return self._add(node)
        if target in _MULTIPLY or target in _DIVIDE:
            return self._scale(node)
        if target in _CONCATENATE:
            return self._concatenate(node)
        return self._through(node, module_for(target, node.args[1:], node.kwargs), node.name)

    def _through(self, node: fx.Node, part: nn.Module, name: str) -> _Step:
        """One value goes through one module."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or (
            node.op == "call_module" and (len(node.args) != 1 or node.kwargs)
        ):
            raise Refused(f"its forward gives {name!r} something other than one value")
        found, back = self._walk(part, name, self.bounds[source])
        self.bounds[node] = found
        return _Step((source,), lambda cotangent: (back(cotangent),))

    def _add(self, node: fx.Node) -> _Step:
        a, b = _two(node)
        alpha = _number(node.kwargs.get("alpha", 1), node) * _ADD[node.target]
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            return self._add_values(node, a, b, abs(alpha))
        if isinstance(a, fx.Node):
            return self._through_both(node, a, 1.0, alpha * _number(b, node))
        return self._through_both(node, b, float(alpha), _number(a, node))

    def _add_values(self, node: fx.Node, a: fx.Node, b: fx.Node, weight: float) -> _Step:
        left, right = self.bounds[a], self.bounds[b]
        if left.shape != right.shape:
            raise Refused(
                f"its forward adds records of shapes {left.shape} and {right.shape}; broadcasting "
                "copies numbers and is not followed, so make the shapes agree"
            )
        total = Bound(left.norm + weight * right.norm, left.shape)
        self.bounds[node], back = self._walk(Total(), node.name, total)

        def shares(cotangent: float) -> tuple[float, ...]:
            arriving = back(cotangent)
            return arriving, weight * arriving

        return _Step((a, b), shares)

    def _through_both(self, node: fx.Node, source: fx.Node, factor: float, by: float) -> _Step:
        """factor·u + by."""
        part = AddNumber(by) if factor == 1 else nn.Sequential(Scale(factor), AddNumber(by))
        found, back = self._walk(part, node.name, self.bounds[source])
        self.bounds[node] = found
        return _Step((source,), lambda cotangent: (back(cotangent),))

    def _scale(self, node: fx.Node) -> _Step:
        a, b = _two(node)
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            raise Refused(
                f"its forward uses {name_of(node.target)} on two values; their product grows with "
                "the square of the input and has no Lipschitz constant"
            )
        source, by = (a, b) if isinstance(a, fx.Node) else (b, a)
        factor = _number(by, node)
        if node.target in _DIVIDE:
            if source is b or factor == 0:
                raise Refused(f"its forward divides {a} by {b}; divide by a number other than 0")
            factor = 1 / factor
        if factor == 0 or not math.isfinite(factor):
            raise Refused(f"its forward multiplies by {factor}")
        found, back = self._walk(Scale(factor), node.name, self.bounds[source])
        self.bounds[node] = found
        return _Step((source,), lambda cotangent: (back(cotangent),))

    def _concatenate(self, node: fx.Node) -> _Step:
        parts: Any = node.args[0] if node.args else node.kwargs.get("tensors")
        axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        known = len(node.args) <= 2 and set(node.kwargs) <= {"tensors", "dim"}
        if not known or not all(isinstance(part, fx.Node) for part in parts):
            raise Refused(f"its forward uses {name_of(node.target)} on more than its own values")
        shape = concatenated([self.bounds[part].shape for part in parts], axis)  # type: ignore[arg-type]
        norm = math.hypot(*(self.bounds[part].norm for part in parts))
        self.bounds[node] = Bound(norm, shape)
        return _Step(tuple(parts), lambda cotangent: (cotangent,) * len(parts))

    def _walk(self, part: nn.Module, name: str, x: Bound) -> tuple[Bound, Pullback]:
        return self.walk(part, f"{self.path}.{name}" if self.path else name, x)


def _two(node: fx.Node) -> tuple[Any, Any]:
    if len(node.args) != 2 or not set(node.kwargs) <= {"alpha"}:
        raise Refused(
            f"its forward uses {name_of(node.target)} with arguments {node.args}, {node.kwargs}"
        )
    return node.args[0], node.args[1]


def _number(value: Any, node: fx.Node) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Refused(f"its forward uses {name_of(node.target)} with {value!r}, no finite number")
    return float(value)


class _Value(fx.Proxy):
    """A value on its way through forward. `u += v` writes into u, and `fx` would not see it."""


def _refuse_in_place(self: _Value, other: Any) -> NoReturn:
    raise Refused("its forward writes into a value (+=, *= and the like); write x = x + y")


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"):
    setattr(_Value, f"__i{_name}__", _refuse_in_place)


class _Tracer(fx.Tracer):
    """One level deep: what a part does is asked of the part."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)


def _trace(module: nn.Module) -> fx.Graph:
    inputs = list(inspect.signature(module.forward).parameters.values())
    if len(inputs) != 1 or inputs[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise Refused(
            "it has neither the three answers of tacit.lipschitz.Bounded nor a forward of one "
            "input to follow; use its counterpart in tacit.lipschitz, let "
            "tacit.lipschitz_twin(model) replace it, or train this model with PerSampleClip"
        )
    try:
        return _Tracer().trace(module)
    except Refused:
        raise
    except Exception as error:
        raise Refused(
            f"its forward cannot be followed ({error}); it must not depend on the values or the "
            "number of records: give it the three answers of tacit.lipschitz.Bounded"
        ) from error


def _require_agreement(module: nn.Module, graph: fx.Graph, shape: tuple[int, ...]) -> None:
    like = next(module.parameters(), torch.zeros(()))
    generator = torch.Generator().manual_seed(0)
    records = torch.randn(2, *shape, generator=generator).to(like)
    traced = fx.GraphModule(module, graph)
    with torch.enable_grad():
        records.requires_grad_()
        one, other = (_with_same_draws(f, records) for f in (module, traced))
        if one.shape != other.shape or not _alike(one, other):
            raise Refused(
                "its forward does something that following it does not show, such as writing into "
                "a value that is used again; give it the three answers of tacit.lipschitz.Bounded"
            )
        if not one.requires_grad:
            return  # nothing goes back, which is within any bound
        cotangent = torch.randn(one.shape, generator=generator).to(one)
        leaves = [records, *(p for p in module.parameters() if p.requires_grad)]
        pairs = zip(*(_back(y, leaves, cotangent) for y in (one, other)), strict=True)
    if not all(_alike(mine, shown) for mine, shown in pairs):
        raise Refused(
            "its way back is not the one that its forward shows, as with an autograd Function; "
            "give it the three answers of tacit.lipschitz.Bounded"
        )


def _back(y: Tensor, leaves: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    if not y.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(y, leaves, cotangent, allow_unused=True)
    each = zip(found, leaves, strict=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in each]


def _alike(a: Tensor, b: Tensor) -> bool:
    """But for rounding: small next to each number, or next to the largest."""
    finite = torch.where(b.isfinite(), b, 0).detach().abs()
    largest = float(finite.max()) if b.numel() else 0.0
    return torch.allclose(a, b, 1e-3, 1e-5 * (1 + largest), equal_nan=True)


def _with_same_draws(module: nn.Module, records: Tensor) -> Tensor:
    """Leaves PyTorch's generators as they were."""
    devices = [records.device] if records.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        found: Tensor = module(records.clone())
    return found
