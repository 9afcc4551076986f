"""A module with a forward of its own, as a graph of steps that is bounded and run.

`torch.fx` writes down what forward does, for the module's present mode and settings. The graph that
it finds takes forward's place. Each value is bounded from the values it is made of; backwards, a
value's cotangent is the sum of what its uses send back:
  u + v        ‖u + v‖ ≤ U + V, and both get the cotangent G
  cat(u, v)    (U² + V²)^(1/2), and both get at most G
  f(u)         by f's three answers
Only what is known to keep records apart is let through. What is run for an operation is the module
of `traced_operations` or the layer that answers for it, never the function that forward called.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, Pullback
from tacit.lipschitz.layers.branches import concatenated
from tacit.lipschitz.layers.inputs import Scale
from tacit.lipschitz.steps import Notes, Step
from tacit.lipschitz.traced_operations import AddNumber, Total, module_for
from tacit.lipschitz.tracing import functional_graph, name_of, part_of

_ADD = {operator.add: 1, torch.add: 1, "add": 1, operator.sub: -1, torch.sub: -1, "sub": -1}
_MULTIPLY = (operator.mul, torch.mul, "mul")
_DIVIDE = (operator.truediv, torch.div, "div")
_CONCATENATE = (torch.cat, torch.concat, torch.concatenate)

# A bound on each value that goes in, to that of what comes out and the way back to each.
_Walk = Callable[[list[Bound], Notes], tuple[Bound, Callable[[float], tuple[float, ...]]]]


@dataclass(frozen=True)
class _Line:
    """One line of the graph: which earlier values it reads, what it computes, its bound.

    `done` are the values that no later line reads.
    """

    sources: tuple[int, ...]
    run: Callable[..., Tensor]
    walk: _Walk
    done: tuple[int, ...] = ()


class GraphStep(Step):
    """Value 0 is the input, value i + 1 what line i gives."""

    def __init__(
        self, path: str, kind: type, lines: list[_Line], exit_: int, steps: list[Step]
    ) -> None:
        super().__init__(path, kind)
        self.steps = nn.ModuleList(steps)
        last = {source: i for i, line in enumerate(lines) for source in line.sources}
        self._lines = tuple(
            _Line(
                line.sources,
                line.run,
                line.walk,
                tuple(v for v in set(line.sources) if last[v] == i and v != exit_),
            )
            for i, line in enumerate(lines)
        )
        self._exit = exit_

    def forward(self, x: Tensor) -> Tensor:
        values: list[Any] = [x]
        for line in self._lines:
            values.append(line.run(*[values[source] for source in line.sources]))
            for value in line.done:
                values[value] = None
        found: Tensor = values[self._exit]
        return found

    def _walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        bounds, backs = [x], []
        for line in self._lines:
            bound, back = line.walk([bounds[source] for source in line.sources], notes)
            bounds.append(bound)
            backs.append(back)

        def pull(cotangent: float) -> float:
            arriving: dict[int, float] = defaultdict(float)
            arriving[self._exit] = cotangent
            for i in reversed(range(len(self._lines))):
                shares = backs[i](arriving[i + 1])
                for source, share in zip(self._lines[i].sources, shares, strict=True):
                    arriving[source] += share
            return arriving[0]

        return bounds[self._exit], pull


def trace(module: nn.Module, path: str, child: Callable[[str, nn.Module], Step]) -> GraphStep:
    """The graph of a module's forward; `child(name, m)` compiles one of its parts."""
    nodes = list(functional_graph(module).nodes)
    exit_ = nodes[-1].args[0]
    if not isinstance(exit_, fx.Node):
        raise Refused("its forward does not return one tensor")
    made = _Translation(module, path, child, {nodes[0]: 0})
    for node in nodes[1:-1]:
        made.lines.append(made.line(node))
        made.numbers[node] = len(made.lines)
    return GraphStep(path, type(module), made.lines, made.numbers[exit_], made.steps)


class _Translation:
    """From the nodes of `torch.fx` to lines."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        child: Callable[[str, nn.Module], Step],
        numbers: dict[fx.Node, int],
    ) -> None:
        self.module, self.path, self.child, self.numbers = module, path, child, numbers
        self.lines: list[_Line] = []
        self.steps: list[Step] = []

    def line(self, node: fx.Node) -> _Line:
        target = node.target
        if node.op == "call_module":
            assert isinstance(target, str)
            return self._through(node, self.child(target, part_of(self.module, target)), target)
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
        operation = module_for(target, node.args[1:], node.kwargs)
        return self._through(node, self._layer(node, operation), node.name)

    def _layer(self, node: fx.Node, operation: nn.Module) -> Step:
        """A step for an operation, compiled like a layer: its settings become plain numbers."""
        return self.child(node.name, operation)

    def _through(self, node: fx.Node, step: Step, name: str) -> _Line:
        """One value goes through one step."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or (
            node.op == "call_module" and (len(node.args) != 1 or node.kwargs)
        ):
            raise Refused(f"its forward gives {name!r} something other than one value")
        return self._one(source, step)

    def _one(self, source: fx.Node, step: Step) -> _Line:
        self.steps.append(step)

        def walk(bounds: list[Bound], notes: Notes) -> Any:
            found, back = step.walk(bounds[0], notes)
            return found, lambda cotangent: (back(cotangent),)

        return _Line((self.numbers[source],), step.forward, walk)

    def _add(self, node: fx.Node) -> _Line:
        a, b = _two(node)
        alpha = _number(node.kwargs.get("alpha", 1), node) * _ADD[node.target]
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            return self._add_values(node, a, b, alpha)
        if isinstance(a, fx.Node):
            return self._one(a, self._affine(node, 1.0, alpha * _number(b, node)))
        return self._one(b, self._affine(node, float(alpha), _number(a, node)))

    def _add_values(self, node: fx.Node, a: fx.Node, b: fx.Node, alpha: float) -> _Line:
        total = self._layer(node, Total())
        self.steps.append(total)

        def walk(bounds: list[Bound], notes: Notes) -> Any:
            left, right = bounds
            if left.shape != right.shape:
                raise Refused(
                    f"its forward adds records of shapes {left.shape} and {right.shape}; "
                    "broadcasting copies numbers and is not followed, so make the shapes agree"
                )
            norm = left.norm + abs(alpha) * right.norm
            found, back = total.walk(Bound(norm, left.shape), notes)

            def shares(cotangent: float) -> tuple[float, ...]:
                arriving = back(cotangent)
                return arriving, abs(alpha) * arriving

            return found, shares

        def run(u: Tensor, v: Tensor) -> Tensor:
            return u + v if alpha == 1 else torch.add(u, v, alpha=alpha)

        return _Line((self.numbers[a], self.numbers[b]), run, walk)

    def _affine(self, node: fx.Node, factor: float, by: float) -> Step:
        """factor·u + by."""
        if factor == 1:
            return self._layer(node, AddNumber(by))
        return self._layer(node, nn.Sequential(_scale(factor), AddNumber(by)))

    def _scale(self, node: fx.Node) -> _Line:
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
        return self._one(source, self._layer(node, _scale(factor)))

    def _concatenate(self, node: fx.Node) -> _Line:
        parts: Any = node.args[0] if node.args else node.kwargs.get("tensors")
        axis: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        known = len(node.args) <= 2 and set(node.kwargs) <= {"tensors", "dim"}
        known = known and type(axis) is int
        if not known or not all(isinstance(part, fx.Node) for part in parts):
            raise Refused(f"its forward uses {name_of(node.target)} on more than its own values")

        count = len(parts)

        def walk(bounds: list[Bound], notes: Notes) -> Any:
            shape = concatenated([bound.shape for bound in bounds], axis)
            norm = math.hypot(*(bound.norm for bound in bounds))
            return Bound(norm, shape), lambda cotangent: (cotangent,) * count

        def run(*values: Tensor) -> Tensor:
            return torch.cat(values, dim=axis)

        return _Line(tuple(self.numbers[part] for part in parts), run, walk)


def _scale(factor: float) -> Scale:
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
        raise Refused(f"its forward uses {name_of(node.target)} with {value!r}, no finite number")
    return float(value)
