"""The steps of a program: what each computes, and how a bound passes through it.

  LayerStep      a layer that gives the three answers
  ComposedStep   a module that says how bounds pass through its children (`walk_bounds`)
  SumStep, ConcatenationStep   several values become one
  GraphStep      steps that read earlier values: an `nn.Sequential`, or a traced forward
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
from tacit.lipschitz.torch_modules import NEGLIGIBLE
from tacit.lipschitz.tracing import (
    ADD,
    SUBTRACT,
    AddNumber,
    functional_graph,
    name_of,
    operation,
    part_of,
    summands,
)
from tacit.precision import EXACT, Rounding
from tacit.torch_internals import tables_of


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
        """The factor by which rounding enlarges answers that are for exact arithmetic."""
        return 1.0 if getattr(answers, "exact", False) else 1 + self.rounding.slack


class Step(nn.Module):
    """Part of a program. `path` and `kind` name the module of the model that it was made from.

    `shares` holds, for each input, the part of the pulled-back cotangent that it receives. A call
    runs no hook, not even one registered for all modules.
    """

    shares: tuple[float, ...] = (1.0,)

    def __init__(self, path: str, kind: type) -> None:
        super().__init__()
        self.path, self.kind = path, kind

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = self.forward(x)
        return output

    def walk(self, notes: Notes, *inputs: Bound) -> tuple[Bound, Pullback]:
        """The bound on the output, and the pullback of a cotangent's bound."""
        with located(self.path, self.kind):
            return self._walk(notes, *inputs)

    def _walk(self, notes: Notes, *inputs: Bound) -> tuple[Bound, Pullback]:
        raise NotImplementedError


class LayerStep(Step):
    """One layer: the forward of its class on a snapshot. `answers` speak for it."""

    def __init__(self, path: str, kind: type, layer: nn.Module, answers: Any = None) -> None:
        super().__init__(path, kind)
        self.layer, self.answers = layer, answers
        self.run: Callable[[Tensor], Tensor] = partial(type(layer).forward, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def _walk(self, notes: Notes, *inputs: Bound) -> tuple[Bound, Pullback]:
        (x,), answers = inputs, self.answers
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
        parameter = tables_of(self.layer.get_submodule(holder)).parameters.get(last)
        if parameter is None or id(parameter) not in notes.names:
            with located(self.path, self.kind):
                raise Refused(f"it answers for {local!r}, which is none of its parameters")
        return notes.names[id(parameter)]

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one record's output, found by running two records of zeros.

        Two, so that a layer that does not keep one row per record is noticed. The zeros are on the
        device of the layer's parameters or buffers.
        """
        tensors = (*self.parameters(), *self.buffers(), torch.zeros(()))
        like = next(tensor for tensor in tensors if tensor.is_floating_point())
        with evaluating(self), torch.no_grad():
            output = self.forward(like.new_zeros(2, *shape))
        if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != 2:
            raise UnboundedLayer(
                f"{self.kind.__name__} does not keep one row per record; a bound is for one record"
            )
        return tuple(output.shape[1:])


class ComposedStep(LayerStep):
    """A module with `walk_bounds`: its class's forward, on a snapshot with steps for children."""

    def _walk(self, notes: Notes, *inputs: Bound) -> tuple[Bound, Pullback]:
        layer: Any = self.layer

        def walk(name: str, x: Bound) -> tuple[Bound, Pullback]:
            step = layer.get_submodule(name)
            if not isinstance(step, Step):
                raise Refused(f"walk_bounds names {name!r}, which is not one of its modules")
            return step.walk(notes, x)

        out, back = layer.walk_bounds(*inputs, walk)
        # Sums that the module computes are rounded too, forwards and backwards.
        larger = notes.enlargement(layer)
        return Bound(out.norm * larger, out.shape), lambda cotangent: back(cotangent) * larger


class SumStep(Step):
    """u + αv: ‖u + αv‖ ≤ U + |α|·V; the cotangent is G for u and |α|·G for v.

    `rounded` is the step of a layer that never runs: its answers say what rounding adds to a sum.
    """

    def __init__(self, path: str, kind: type, alpha: float, rounded: Step) -> None:
        super().__init__(path, kind)
        self.rounded, self.shares = rounded, (1.0, abs(alpha))
        self.run = torch.add if alpha == 1 else partial(torch.add, alpha=alpha)

    def forward(self, *values: Tensor) -> Tensor:
        return self.run(*values)

    def _walk(self, notes: Notes, *bounds: Bound) -> tuple[Bound, Pullback]:
        u, v = bounds
        require_one_shape(u, v)
        return self.rounded.walk(notes, Bound(u.norm + self.shares[1] * v.norm, u.shape))


class ConcatenationStep(Step):
    """(u, v, …) along one axis: (U² + V² + …)^(1/2), and each gets at most the cotangent G."""

    def __init__(self, path: str, kind: type, axis: int, count: int) -> None:
        super().__init__(path, kind)
        self.axis, self.shares = axis, (1.0,) * count

    def forward(self, *values: Tensor) -> Tensor:
        return torch.cat(values, dim=self.axis)

    def _walk(self, notes: Notes, *bounds: Bound) -> tuple[Bound, Pullback]:
        return concatenated(bounds, self.axis), lambda cotangent: cotangent


class GraphStep(Step):
    """Steps that read earlier values: value 0 is the input, value i + 1 the output of step i.

    Each line is a step and the values that it reads. Backwards, the cotangent of a value is the sum
    of what the steps that read it send back.
    """

    def __init__(
        self, path: str, kind: type, lines: Sequence[tuple[Step, tuple[int, ...]]], output: int
    ) -> None:
        super().__init__(path, kind)
        self.steps = nn.ModuleList(step for step, _ in lines)
        self.lines, self.output = tuple(lines), output
        # The values that no later line reads.
        self.dropped: list[list[int]] = [[] for _ in lines]
        last_use = {source: i for i, (_, sources) in enumerate(lines) for source in sources}
        for value, i in last_use.items():
            if value != output:
                self.dropped[i].append(value)

    def forward(self, x: Tensor) -> Tensor:
        values: list[Any] = [x]
        for (step, sources), dropped in zip(self.lines, self.dropped, strict=True):
            values.append(step.forward(*[values[source] for source in sources]))
            for value in dropped:
                values[value] = None
        output: Tensor = values[self.output]
        return output

    def _walk(self, notes: Notes, *inputs: Bound) -> tuple[Bound, Pullback]:
        bounds, backs = list(inputs), []
        for step, sources in self.lines:
            bound, back = step.walk(notes, *[bounds[source] for source in sources])
            bounds.append(bound)
            backs.append(back)

        def pull(cotangent: float) -> float:
            arriving: dict[int, float] = defaultdict(float)
            arriving[self.output] = cotangent
            for i, (step, sources) in reversed(list(enumerate(self.lines))):
                pulled_back = backs[i](arriving[i + 1])
                for source, share in zip(sources, step.shares, strict=True):
                    arriving[source] += share * pulled_back
            return arriving[0]

        return bounds[self.output], pull


class UnboundedStep(Step):
    """A child without a bound. The error is raised when its parent uses it."""

    def __init__(self, path: str, kind: type, error: UnboundedLayer) -> None:
        super().__init__(path, kind)
        self.error = error

    def _walk(self, notes: Notes, *inputs: Bound) -> tuple[Bound, Pullback]:
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

    What runs for an operation is the module that `operation` names, compiled like a layer with
    plain numbers for settings, and never the function that forward called. Operations on several
    values are sums and concatenations. Everything else has no bound: products of activations,
    indexing among records, anything along the batch axis.
    """
    entry, *nodes, last = functional_graph(module).nodes
    if not isinstance(last.args[0], fx.Node):
        raise Refused("its forward does not return one tensor")
    numbers: dict[fx.Node, int] = {entry: 0}
    lines: list[tuple[Step, tuple[int, ...]]] = []

    def line(node: fx.Node) -> tuple[Step, Sequence[Any]]:
        """The step of a node, and the nodes whose values it reads."""
        target: Any = node.target
        if node.op == "get_attr":
            raise Refused(
                f"its forward uses the tensor {target!r} by itself; put it into a layer that "
                "answers for it, such as tacit.lipschitz.AddBias"
            )
        if node.op == "call_module":
            one_value = len(node.args) == 1 and not node.kwargs
            return child(target, part_of(module, target)), node.args if one_value else (None,)
        if target in _CONCATENATE:
            values, axis = _concatenated_values(node)
            return ConcatenationStep(path, type(module), axis, len(values)), values
        if target in (*ADD, *SUBTRACT):
            u, v, alpha = summands(node)
            if isinstance(u, fx.Node) and isinstance(v, fx.Node):
                rounded = child(node.name, AddNumber(0.0))
                return SumStep(path, type(module), alpha, rounded), (u, v)
        part, value = operation(node)
        return child(node.name, part), (value,)

    for node in nodes:
        step, values = line(node)
        if not all(isinstance(value, fx.Node) for value in values):
            name = node.target if node.op == "call_module" else node.name
            raise Refused(f"its forward gives {name!r} something other than one value")
        lines.append((step, tuple(numbers[value] for value in values)))
        numbers[node] = len(lines)
    return GraphStep(path, type(module), lines, numbers[last.args[0]])


def _concatenated_values(node: fx.Node) -> tuple[Sequence[Any], int]:
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    values: Any = given.get("tensors")
    axis: Any = given.get("dim", 0)
    known = len(node.args) <= 2 and given.keys() <= {"tensors", "dim"} and type(axis) is int
    if not known or not all(isinstance(value, fx.Node) for value in values):
        raise Refused(f"its forward uses {name_of(node.target)} on more than its own values")
    return values, axis
