"""The program that is bounded and run: a model compiled once into steps.

A query, a certificate and the propagation of bounds all use this one object. Its steps are

  LayerStep      a layer with the three answers: its class's forward on a snapshot of its data
  SequenceStep   steps one after the other (`nn.Sequential`)
  ComposedStep   a module that says how bounds pass through its children (`walk_bounds`), with steps
                 in the children's places
  GraphStep      a module with a forward of its own, as `torch.fx` traced it

The model's Python code runs while it is traced, without any record, and never again. So a forward
that looks at the number of records, at a counter or at whether it is being traced has decided for
one program, and that one is bounded and run. Nothing done to a layer after compiling reaches its
snapshot, except the values of its parameters. Those are kept in their sets, by the constraints of
the same snapshots. A change of the model that `fingerprint` shows is compiled anew; one that it
misses leaves the program and its bounds as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from tacit.errors import UnboundedLayer
from tacit.lipschitz.bounds import Bound, Pullback
from tacit.lipschitz.integrity import (
    ORIGINALS,
    answering_class,
    gives_answers,
    members,
    ours,
    require_no_hidden_code,
    require_no_hooks,
)
from tacit.lipschitz.known_modules import KNOWN
from tacit.lipschitz.projection import Constraint
from tacit.lipschitz.refused import Refused
from tacit.lipschitz.snapshot import snapshot, whole
from tacit.lipschitz.steps import (
    ComposedStep,
    Hookless,
    LayerStep,
    Notes,
    SequenceStep,
    Step,
    UnboundedStep,
    located,
)
from tacit.lipschitz.traced import trace

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class Program(Hookless):
    """A compiled model: `program(inputs)` computes, `walk` bounds, on the same steps.

    `trained` are the model's trainable parameters by their names in the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        named = [
            (f"{path}.{name}" if path else name, parameter)
            for path, module in members(model)
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        # A parameter that is used twice has the name of its first use, as in `named_parameters`.
        self.names: dict[int, str] = {}
        for name, parameter in named:
            self.names.setdefault(id(parameter), name)
        self.trained = {
            name: p for name, p in named if p.requires_grad and self.names[id(p)] == name
        }
        self.body = compile_step(model, "")
        layers = [s.layer for s in self.body.modules() if isinstance(s, LayerStep | ComposedStep)]
        inside = [m for layer in layers for m in layer.modules() if not isinstance(m, Step)]
        kinds = {type(m) for m in (self.body, *inside)}
        self.own_answers = any(not ours(k) and gives_answers(k) for k in kinds)
        self._constrained = [m for m in dict.fromkeys(inside) if hasattr(type(m), "constraints")]
        owners = dict.fromkeys(o for kind in kinds for o in ORIGINALS.remember(kind))
        self._owners = tuple(owners)
        self.require_originals()
        try:
            self.constraints()
        except AttributeError as error:
            raise UnboundedLayer(
                f"a constrained weight is missing ({error}); give the layer its torch.nn.Parameter"
            ) from error

    def forward(self, x: Tensor) -> Tensor:
        return self.body.forward(x)

    def walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        return self.body.walk(x, notes)

    def constraints(self) -> list[Constraint]:
        """The sets that the bounds take the weights to be in; of a shared weight, all of them.

        Only a parameter can be kept in a set: a weight that is computed from another (by a
        parametrization, say) would be computed anew, outside it.
        """
        found = [c for layer in self._constrained for c in layer.constraints()]  # type: ignore[operator]
        if not all(isinstance(c.parameter, nn.Parameter) for c in found):
            raise UnboundedLayer(
                "a constrained weight is computed from other parameters and cannot be projected; "
                "remove its parametrization, or train this model with PerSampleClip"
            )
        return found

    def require_originals(self) -> None:
        """Refuse to go on if the code of a layer's class was replaced since Tacit was imported."""
        ORIGINALS.require_unchanged(self._owners)


def compile_program(model: nn.Module) -> Program:
    """Compile a model in its present mode. `UnboundedLayer` if a part of it has no bound."""
    require_no_hooks(model)
    return Program(model)


def compile_step(module: nn.Module, path: str, above: tuple[int, ...] = ()) -> Step:
    kind = type(module)
    inside = (*above, id(module))
    with located(path, kind):
        if id(module) in above:
            raise Refused("it contains itself")

        def child(name: str, part: nn.Module) -> Step:
            return compile_step(part, f"{path}.{name}" if path else name, inside)

        if kind is nn.Sequential:
            require_no_hidden_code(module, kind)
            steps = [child(name, part) for name, part in _children(module)]
            return SequenceStep(path, kind, steps)
        if kind in KNOWN:
            layer = snapshot(module, kind, _no_child)
            return LayerStep(path, kind, layer, KNOWN[kind](layer))
        if not gives_answers(kind):
            return trace(module, path, child)
        running = answering_class(module)
        if hasattr(running, "walk_bounds"):
            return ComposedStep(path, kind, snapshot(module, running, _deferring(child)))
        part = _no_child if ours(running) else lambda name, m: whole(m)
        return LayerStep(path, kind, snapshot(module, running, part))


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module._modules.items():
        if not isinstance(part, nn.Module):
            raise Refused(f"its child {name!r} is a {type(part).__name__} and no module")
        yield name, part


def _no_child(name: str, part: nn.Module) -> nn.Module:
    raise Refused(
        f"it was given a child module {name!r}, which its class does not have; remove it, and "
        "remove parametrizations"
    )


def _deferring(child: Callable[[str, nn.Module], Step]) -> Callable[[str, nn.Module], nn.Module]:
    """Steps for the children, also of lists and dictionaries of modules.

    A child without a bound is refused where it is used.
    """

    def made(name: str, part: nn.Module) -> nn.Module:
        if type(part) in _CONTAINERS:
            inner: nn.Module = snapshot(part, type(part), lambda n, m: made(f"{name}.{n}", m))
            return inner
        if isinstance(part, _CONTAINERS):
            raise Refused(
                f"its {name} is a {type(part).__name__}, which may give other modules than it "
                "holds; use nn.ModuleList or nn.ModuleDict itself"
            )
        try:
            return child(name, part)
        except UnboundedLayer as error:
            return UnboundedStep(name, type(part), error)

    return made


def _remember_layers(kind: type = nn.Module) -> None:
    """The code of every layer class that is there when Tacit is imported."""
    if ours(kind):
        ORIGINALS.remember(kind)
    derived: type
    for derived in kind.__subclasses__():
        _remember_layers(derived)


_remember_layers()
