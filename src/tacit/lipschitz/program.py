"""The program that is bounded and run: a model compiled once into steps.

Queries, certificates and the propagation of bounds all use this one object. The model's Python code
runs while it is traced, without any record, and never again. So a forward that looks at the number
of records, at a counter or at whether it is being traced has decided for one program, and that one
is bounded and run.

The steps run on snapshots of the layers. A snapshot is an instance of the class that the answers
are for. It shares the layer's parameters and buffers, copies its settings as plain numbers and
strings, and has no hooks. So what is done to a layer after compiling reaches the program only
through the values of its parameters, and the constraints of the same snapshots keep those in their
sets. A change that `fingerprint` shows is compiled anew; one that it misses leaves the program and
its bounds as they are.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from tacit.checks.side_effects import frozen
from tacit.errors import Refused, UnboundedLayer
from tacit.lipschitz.bounds import Bound, Pullback
from tacit.lipschitz.integrity import (
    answering_class,
    gives_answers,
    joined,
    members,
    ours,
    record_original_code,
    require_no_hidden_code,
    require_no_hooks,
    require_original_code,
)
from tacit.lipschitz.projection import Constraint, require_parameters
from tacit.lipschitz.steps import (
    ComposedStep,
    GraphStep,
    LayerStep,
    Notes,
    Step,
    UnboundedStep,
    located,
    trace,
)
from tacit.lipschitz.torch_modules import KNOWN
from tacit.torch_internals import foreign_hooks, tables_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)

# What takes the place of a child of that name.
Child = Callable[[str, nn.Module], nn.Module]


class Program(Step):
    """A compiled model: `program(inputs)` computes, `walk` bounds, on the same steps.

    `trained` holds the model's trainable parameters by their names in the model. A parameter that
    is used twice has the name of its first use, as in `named_parameters`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__("", type(model))
        named = {
            joined(path, name): parameter
            for path, module in members(model)
            for name, parameter in tables_of(module).parameters.items()
            if parameter is not None
        }
        self.names: dict[int, str] = {}
        for name, parameter in named.items():
            self.names.setdefault(id(parameter), name)
        self.trained = {
            n: p for n, p in named.items() if p.requires_grad and self.names[id(p)] == n
        }
        self.body = compile_step(model, "")
        layers = [step.layer for step in self.body.modules() if isinstance(step, LayerStep)]
        inside = [m for layer in layers for m in layer.modules() if not isinstance(m, Step)]
        kinds = {type(m) for m in (self.body, *inside)}
        self.own_answers = any(not ours(k) and gives_answers(k) for k in kinds)
        self._constrained = [m for m in dict.fromkeys(inside) if hasattr(type(m), "constraints")]
        self._owners = tuple(dict.fromkeys(o for kind in kinds for o in record_original_code(kind)))
        self.require_originals()
        self.constraints()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body.forward(x)
        return output

    def _walk(self, notes: Notes, *inputs: Bound) -> tuple[Bound, Pullback]:
        return self.body.walk(notes, *inputs)

    def constraints(self) -> list[Constraint]:
        """The sets that the bounds assume the weights to be in; a shared weight is in several."""
        return require_parameters(c for layer in self._constrained for c in layer.constraints())  # type: ignore[operator]

    def require_originals(self) -> None:
        """Refuse to run if the code of a layer's class was replaced since Tacit was imported."""
        require_original_code(self._owners)


def compile_program(model: nn.Module) -> Program:
    """Compile a model in its present mode. `UnboundedLayer` if a part of it has no bound."""
    require_no_hooks(model)
    return Program(model)


def compile_step(module: nn.Module, path: str, above: tuple[int, ...] = ()) -> Step:
    """The step of a module; `above` are the modules that contain it."""
    kind = type(module)
    with located(path, kind):
        if id(module) in above:
            raise Refused("it contains itself")

        def child(name: str, part: nn.Module) -> Step:
            return compile_step(part, joined(path, name), (*above, id(module)))

        if kind is nn.Sequential:
            steps = snapshot(module, kind, child)._modules.values()
            lines = [(step, (i,)) for i, step in enumerate(steps)]
            return GraphStep(path, kind, lines, len(lines))
        if not (kind in KNOWN or gives_answers(kind)):
            return trace(module, path, child)
        running = kind if kind in KNOWN else answering_class(module)
        if hasattr(running, "walk_bounds"):
            return ComposedStep(path, kind, snapshot(module, running, _deferring(child)))
        layer = snapshot(module, running, lambda name, part: whole(part))
        return LayerStep(path, kind, layer, KNOWN[kind](layer) if kind in KNOWN else layer)


def _deferring(child: Callable[[str, nn.Module], Step]) -> Child:
    """Steps for the children, also of lists and dictionaries of modules.

    A child without a bound is refused only where it is used.
    """

    def step_or_container(name: str, part: nn.Module) -> nn.Module:
        try:
            if not isinstance(part, _CONTAINERS):
                return child(name, part)
        except UnboundedLayer as error:
            return UnboundedStep(name, type(part), error)
        if type(part) not in _CONTAINERS:
            raise Refused(
                f"its {name} is a {type(part).__name__}, which may give other modules than it "
                "holds; use nn.ModuleList or nn.ModuleDict itself"
            )
        container: nn.Module = snapshot(
            part, type(part), lambda n, m: step_or_container(f"{name}.{n}", m)
        )
        return container

    return step_or_container


def _record_layer_classes(kind: type = nn.Module) -> None:
    """Record the code of every layer class that exists when Tacit is imported."""
    if ours(kind):
        record_original_code(kind)
    derived: type
    for derived in kind.__subclasses__():
        _record_layer_classes(derived)


_record_layer_classes()


# Attributes that every module has; a snapshot begins with its own.
_TABLES = frozenset(vars(nn.Module()))
_LEFT_OUT = object()


def snapshot(module: nn.Module, kind: type, child: Child) -> Any:
    """A copy of `module` as an instance of `kind`; `child(name, m)` takes a child's place."""
    require_no_hidden_code(module, kind)
    copied: Any = object.__new__(kind)
    nn.Module.__init__(copied)
    for name, value in vars(module).items():
        if name in _TABLES:
            continue
        if ours(kind):
            value = _setting(kind, name, value)
        if value is not _LEFT_OUT:
            vars(copied)[name] = value
    copied.training = module.training
    given, own = tables_of(module), tables_of(copied)
    for name, parameter in given.parameters.items():
        # A subclass of Parameter may compute something else with every operation.
        if parameter is not None and type(parameter) is not nn.Parameter:
            raise Refused(
                f"its {name} is a {type(parameter).__name__}; make it a plain torch.nn.Parameter"
            )
        own.parameters[name] = parameter
    for name, buffer in given.buffers.items():
        if ours(kind) and buffer is not None and type(buffer) is not Tensor:
            raise Refused(f"its {name} is a {type(buffer).__name__}; make it a plain torch.Tensor")
        own.buffers[name] = buffer
    own.unsaved.update(given.unsaved)
    for name, part in given.children.items():
        if part is not None and not isinstance(part, nn.Module):
            raise Refused(f"its child {name!r} is a {type(part).__name__} and no module")
        own.children[name] = part if part is None else child(name, part)
    return copied


def whole(module: nn.Module) -> Any:
    """A snapshot of a module and of everything in it, each an instance of its own class."""
    return snapshot(module, type(module), lambda name, part: whole(part))


def _setting(kind: type, name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        raise Refused(
            f"its {name} is a tensor that is neither a parameter nor a buffer, so nothing keeps it "
            f"in its set; make it a torch.nn.Parameter, and remove parametrizations"
        )
    plain = _plain(value)
    # A set of weights may be a user's own, as a layer may.
    return value if plain is _LEFT_OUT and name in getattr(kind, "objects", ()) else plain


def _plain(value: Any) -> Any:
    """The same value made of Python's own types; objects of unknown classes are left out."""
    if value is None or isinstance(value, bool | torch.dtype | torch.device | torch.Size):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(_plain(v) for v in list(value))
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    if dataclasses.is_dataclass(value) and ours(type(value)):
        # Without __init__, which has already made its fields what they are.
        copied = object.__new__(type(value))
        for field in dataclasses.fields(value):
            own = getattr(value, field.name)
            object.__setattr__(copied, field.name, own if isinstance(own, Tensor) else _plain(own))
        return copied
    return value if value is Ellipsis else _LEFT_OUT


def fingerprint(model: nn.Module) -> Hashable:
    """Everything that a program is compiled from: modules, tensors, settings, modes and hooks.

    While it stays the same, so does the program. Where it misses a change inside an object, the
    program stays as it was compiled, and its bounds are still its own.
    """
    return tuple([_state(module) for _, module in members(model)])


def _state(module: nn.Module) -> Hashable:
    parameters, buffers, children, _ = tables_of(module)
    return (
        type(module),
        id(module),
        tuple(foreign_hooks(module)),
        tuple([(n, id(part)) for n, part in children.items()]),
        tuple([(n, *_tensor(p)) for n, p in parameters.items()]),
        tuple([(n, *_tensor(b)) for n, b in buffers.items()]),
        module.training,
        tuple([(n, frozen(v)) for n, v in vars(module).items() if n not in _TABLES]),
    )


def _tensor(tensor: Tensor | None) -> tuple[Hashable, ...]:
    if tensor is None:
        return ()
    return type(tensor), id(tensor), tensor.requires_grad, tensor.shape, tensor.dtype, tensor.device
