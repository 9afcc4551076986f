"""The steps of a program: what each computes, and how a bound passes through it.

  LayerStep      a layer that gives the three answers
  ComposedStep   a module that says how bounds pass through its children (`walk_bounds`)
  GraphStep      lines that read earlier values: an `nn.Sequential`, or a traced forward
  UnboundedStep  a child without a bound, which its parent may never use

`forward` computes and `walk` bounds, both on the same data. A step runs the forward of a class on a
snapshot of a layer, so nothing that was done to the instance takes part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from tacit.errors import Refused, UnboundedLayer
from tacit.lipschitz.bounds import Bound, Pullback
from tacit.lipschitz.integrity import place
from tacit.lipschitz.layers.branches import concatenated, require_one_shape
from tacit.lipschitz.layers.limits import Scale
from tacit.lipschitz.torch_modules import NEGLIGIBLE
from tacit.lipschitz.tracing import (
    ADD,
    DIVIDE,
    MULTIPLY,
    SUBTRACT,
    AddNumber,
    functional_graph,
    module_for,
    name_of,
    part_of,
)
from tacit.precision import EXACT, Rounding


@dataclass(frozen=True)
class LayerRow:
    """One use of one layer, as `tacit inspect` shows it."""

    name: str
    kind: str
    input_norm: float
    output_norm: float
    lipschitz: float
    cotangent: float
    gradient_norms: dict[str, float]


@dataclass
class Notes:
    """The settings of a walk, and what it finds: bounds by parameter and one row per layer.

    `clips` says whether layers limit cotangents (`ClipGradient`), as they do in training.
    """

    names: dict[int, str]
    rounding: Rounding = EXACT
    clips: bool = True
    by_parameter: dict[str, float] = field(default_factory=dict)
    layers: list[LayerRow] = field(default_factory=list)

    def enlargement(self, answers: object) -> float:
        """What rounding makes of answers that are for exact arithmetic."""
        return 1.0 if getattr(answers, "exact", False) else 1 + self.rounding.slack


class Hookless(nn.Module):
    """A module that runs no hook when called, not even one registered for all modules."""

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = self.forward(x)
        return output


class Step(Hookless):
    """Part of a program. `path` and `kind` name the module of the model that it was made from."""

    def __init__(self, path: str, kind: type) -> None:
        super().__init__()
        self.path, self.kind = path, kind

    def walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        """The bound on the output, and the pullback of a cotangent's bound."""
        with located(self.path, self.kind):
            return self._walk(x, notes)

    def _walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        raise NotImplementedError


class LayerStep(Step):
    """One layer: the forward of its class on a snapshot. `answers` speak for it."""

    def __init__(self, path: str, kind: type, layer: nn.Module, answers: Any = None) -> None:
        super().__init__(path, kind)
        self.layer, self.answers = layer, answers
        self.run: Callable[[Tensor], Tensor] = partial(type(layer).forward, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def _walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        answers = self.answers
        jump = getattr(answers, "jump", 0.0)
        if not notes.clips and jump > NEGLIGIBLE:
            # A derivative may be bounded on both sides of a jump; differences of outputs are not.
            raise Refused(
                f"it jumps by {jump:.3g}, so it has no Lipschitz constant in its input; use "
                "nn.Softplus with a larger threshold, such as 20 for a beta of 1"
            )
        larger = notes.enlargement(answers)
        out = Bound(answers.output_norm(x) * larger, self.output_shape(x.shape))
        lipschitz = answers.lipschitz(x) * larger
        limit = getattr(answers, "cotangent_limit", math.inf) if notes.clips else math.inf

        def back(cotangent: float) -> float:
            norms = answers.gradient_norms(x, cotangent)
            gradients = {name: norm * larger for name, norm in norms.items()}
            for local, norm in gradients.items():
                name = self._global_name(local, notes)
                notes.by_parameter[name] = notes.by_parameter.get(name, 0.0) + norm
            row = (self.path or "model", self.kind.__name__, x.norm, out.norm, lipschitz, cotangent)
            notes.layers.append(LayerRow(*row, gradients))
            arriving = min(cotangent, limit)
            # A cotangent of 0 stays 0 through any layer; 0 · ∞ would be NaN.
            return 0.0 if 0 in (lipschitz, arriving) else lipschitz * arriving

        return out, back

    def _global_name(self, local: str, notes: Notes) -> str:
        holder, _, last = local.rpartition(".")
        parameter = self.layer.get_submodule(holder)._parameters.get(last)
        if parameter is None or id(parameter) not in notes.names:
            with located(self.path, self.kind):
                raise Refused(f"it answers for {local!r}, which is none of its parameters")
        return notes.names[id(parameter)]

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one record's output, found by running two records of zeros.

        Two, so that a layer that does not keep one row per record is noticed. The zeros are on the
        device of the layer's parameters or buffers.
        """
        held = (*self.parameters(), *self.buffers(), torch.zeros(()))
        like = next(tensor for tensor in held if tensor.is_floating_point())
        with evaluating(self), torch.no_grad():
            output = self.forward(like.new_zeros(2, *shape))
        if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != 2:
            raise UnboundedLayer(
                f"{self.kind.__name__} does not keep one row per record; a bound is for one record"
            )
        return tuple(output.shape[1:])


class ComposedStep(LayerStep):
    """A module with `walk_bounds`: its class's forward, on a snapshot with steps for children."""

    def _walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        layer: Any = self.layer

        def walk(name: str, x: Bound) -> tuple[Bound, Pullback]:
            step = layer.get_submodule(name)
            if not isinstance(step, Step):
                raise Refused(f"walk_bounds names {name!r}, which is not one of its modules")
            return step.walk(x, notes)

        out, back = layer.walk_bounds(x, walk)
        # Sums that the module computes are rounded too, forwards and backwards.
        larger = notes.enlargement(layer)
        return Bound(out.norm * larger, out.shape), lambda cotangent: back(cotangent) * larger


# Bounds on the values that a line reads, to the bound on its output and the shares of a cotangent.
LineWalk = Callable[[list[Bound], Notes], tuple[Bound, Callable[[float], Sequence[float]]]]


@dataclass(frozen=True)
class Line:
    """One line of a `GraphStep`: which earlier values it reads, what it computes, its bound."""

    sources: tuple[int, ...]
    run: Callable[..., Tensor]
    walk: LineWalk
    step: Step | None = None


def step_line(source: int, step: Step) -> Line:
    """One value through one step."""

    def walk(bounds: list[Bound], notes: Notes) -> Any:
        out, back = step.walk(bounds[0], notes)
        return out, lambda cotangent: (back(cotangent),)

    return Line((source,), step.forward, walk, step)


class GraphStep(Step):
    """Lines that read earlier values: value 0 is the input, value i + 1 the output of line i.

    Backwards, the cotangent of a value is the sum of what the lines that read it send back.
    """

    def __init__(self, path: str, kind: type, lines: Sequence[Line], output: int) -> None:
        super().__init__(path, kind)
        self.steps = nn.ModuleList(line.step for line in lines if line.step is not None)
        self.lines, self.output = tuple(lines), output
        # The values that no line after this one reads.
        self.dropped: list[list[int]] = [[] for _ in lines]
        last = {source: i for i, line in enumerate(lines) for source in line.sources}
        for value, i in last.items():
            if value != output:
                self.dropped[i].append(value)

    def forward(self, x: Tensor) -> Tensor:
        values: list[Any] = [x]
        for line, dropped in zip(self.lines, self.dropped, strict=True):
            values.append(line.run(*[values[source] for source in line.sources]))
            for value in dropped:
                values[value] = None
        output: Tensor = values[self.output]
        return output

    def _walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        bounds, backs = [x], []
        for line in self.lines:
            bound, back = line.walk([bounds[source] for source in line.sources], notes)
            bounds.append(bound)
            backs.append(back)

        def pull(cotangent: float) -> float:
            arriving: dict[int, float] = defaultdict(float)
            arriving[self.output] = cotangent
            for i in reversed(range(len(backs))):
                shares = backs[i](arriving[i + 1])
                for source, share in zip(self.lines[i].sources, shares, strict=True):
                    arriving[source] += share
            return arriving[0]

        return bounds[self.output], pull


class UnboundedStep(Step):
    """A child without a bound. The error is raised when its parent uses it."""

    def __init__(self, path: str, kind: type, error: UnboundedLayer) -> None:
        super().__init__(path, kind)
        self.error = error

    def _walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        raise self.error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@contextmanager
def located(path: str, kind: type) -> Iterator[None]:
    """Say which layer a refusal is about."""
    try:
        yield
    except Refused as refused:
        where = place(path, kind)
        raise UnboundedLayer(f"{where} has no gradient bound: {refused}") from refused


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode for a while, without calling methods of the model."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# ---- a forward of a module's own -----------------------------------------------------------------

_CONCATENATE = (torch.cat, torch.concat, torch.concatenate)


def trace(module: nn.Module, path: str, child: Callable[[str, nn.Module], Step]) -> GraphStep:
    """A module's forward, for its present mode and settings; `child(name, m)` compiles a part.

      u + v        ‖u + v‖ ≤ U + V, and both get the cotangent G
      cat(u, v)    (U² + V²)^(1/2), and both get at most G
      f(u)         by f's three answers
    What runs for an operation is the module that `OPERATIONS` names, never the function that
    forward called. Everything else has no bound: products of activations, indexing among records,
    anything along the batch axis.
    """
    entry, *nodes, last = functional_graph(module).nodes
    if not isinstance(last.args[0], fx.Node):
        raise Refused("its forward does not return one tensor")
    translation = _Translation(module, child, entry)
    for node in nodes:
        translation.append(node)
    return GraphStep(path, type(module), translation.lines, translation.numbers[last.args[0]])


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
        target: Any = node.target
        if node.op == "get_attr":
            raise Refused(
                f"its forward uses the tensor {target!r} by itself; put it into a layer that "
                "answers for it, such as tacit.lipschitz.AddBias"
            )
        if node.op == "call_module":
            one = len(node.args) == 1 and not node.kwargs
            part = part_of(self.module, target)
            return self._through(node.args[0] if one else None, target, part)
        if target in (*ADD, *SUBTRACT):
            return self._add(node)
        if target in (*MULTIPLY, *DIVIDE):
            return self._scale(node)
        if target in _CONCATENATE:
            return self._concatenate(node)
        source = node.args[0] if node.args else None
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
        if not isinstance(b, fx.Node):
            return self._through(a, node.name, AddNumber(alpha * _number(b, node)))
        if not isinstance(a, fx.Node):
            added: nn.Module = AddNumber(_number(a, node))
            made = added if alpha == 1 else nn.Sequential(_scaling(alpha), added)
            return self._through(b, node.name, made)
        total = self.child(node.name, AddNumber(0.0))  # for the rounding of the sum; it never runs

        def walk(bounds: list[Bound], notes: Notes) -> Any:
            left, right = bounds
            require_one_shape(left, right)
            norm = left.norm + abs(alpha) * right.norm
            out, back = total.walk(Bound(norm, left.shape), notes)

            def shares(cotangent: float) -> tuple[float, float]:
                arriving = back(cotangent)
                return arriving, abs(alpha) * arriving

            return out, shares

        run = torch.add if alpha == 1 else partial(torch.add, alpha=alpha)
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
        given = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
        parts: Any = given.get("tensors")
        axis: Any = given.get("dim", 0)
        known = len(node.args) <= 2 and given.keys() <= {"tensors", "dim"} and type(axis) is int
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
