"""What a model consists of: one walk over its modules, kept for as long as nothing has changed.

A step asks four times: for settings (is this the program that was checked?), for tensors before and
after (was anything written?), for the state that a recording depends on, and for the trained
parameters. A walk over the modules of ResNet-18 takes half a millisecond, as long as a fifth of its
step on a GPU. So the answers are kept, and each question only compares what Python holds now with
what it held then: children, attributes and tensors by identity, lists by value.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tacit.torch_internals import foreign_hooks, process_wide_hooks, version_of

# A module, by id, and the name of a tensor that it holds.
Place = tuple[int, str]

_MOST_CHANGES = 8
_FLAGS = frozenset({bool, str, type(None)})
_NUMBERS = frozenset({bool, int, float, str})
_SEQUENCES = frozenset({tuple, list})

# The numbers that modules hold as attributes: the last value, and how often it has changed.
_numbers: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[int, int]]] = (
    weakref.WeakKeyDictionary()
)
_tables: weakref.WeakKeyDictionary[nn.Module, ModelTable] = weakref.WeakKeyDictionary()


def table_of(model: nn.Module) -> ModelTable:
    """What a model consists of now. Modules are walked again only if something has changed."""
    table = _tables.get(model)
    if table is None or not table.is_current():
        table = _tables[model] = ModelTable(model)
    return table


class ModelTable:
    """A model's modules, tensors and settings at one moment. It keeps none of them alive.

    Attributes:
        settings: see `settings_of`.
        state: what a recording depends on: types, settings that are computed with, addresses.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._modules = [weakref.ref(module) for module in modules]
        self._snapshots = [_ModuleSnapshot(module) for module in modules]
        self._hooks = tuple(process_wide_hooks())
        tensors = _tensors_of(modules)
        self._tensors = {place: weakref.ref(tensor) for place, tensor in tensors.items()}
        self._named = {name: weakref.ref(p) for name, p in model.named_parameters()}
        self._addresses = [tensor.data_ptr() for tensor in tensors.values()]
        self.settings = settings_of(modules)
        self.state = tuple(self._addresses), tuple(seen.state for seen in self._snapshots)

    @property
    def modules(self) -> list[nn.Module]:
        """All of them, each once."""
        return [module for held in self._modules if (module := held()) is not None]

    @property
    def tensors(self) -> dict[Place, Tensor]:
        """Parameters and buffers, by module and name."""
        found = {place: t for place, held in self._tensors.items() if (t := held()) is not None}
        # A scripted module makes new ones of Python's each time it is asked.
        return found if len(found) == len(self._tensors) else _tensors_of(self.modules)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By their full names, each once."""
        found = {name: p for name, held in self._named.items() if (p := held()) is not None}
        same = len(found) == len(self._named)
        return found if same else dict(self.modules[0].named_parameters())

    def is_current(self) -> bool:
        """Whether a walk would find the same."""
        modules, tensors = self.modules, self.tensors.values()
        return (
            self._hooks == tuple(process_wide_hooks())
            and len(modules) == len(self._modules)
            and all(seen.is_current(m) for seen, m in zip(self._snapshots, modules, strict=True))
            and [tensor.data_ptr() for tensor in tensors] == self._addresses
        )


class _ModuleSnapshot:
    """What one module held, by identity. Numbers and flags are kept, so theirs are not reused."""

    def __init__(self, module: nn.Module) -> None:
        values = vars(module).values()
        self.held = _held(module)
        self.hooks = tuple(foreign_hooks(module))
        self.plain = tuple(v for v in values if type(v) in _NUMBERS or _is_fixed(v))
        self.frozen = tuple(map(frozen, _changeable(module)))
        self.state = type(module), id(module), self.plain, self.frozen
        self.has_changeable = bool(self.frozen)

    def is_current(self, module: nn.Module) -> bool:
        if _held(module) != self.held or tuple(foreign_hooks(module)) != self.hooks:
            return False
        return not self.has_changeable or self.frozen == tuple(map(frozen, _changeable(module)))


def _is_fixed(value: Any) -> bool:
    """Whether a tuple holds numbers alone, so that its identity says what it holds."""
    return type(value) is tuple and all(type(inner) in _NUMBERS for inner in value)


def _changeable(module: nn.Module) -> list[Any]:
    values = vars(module).values()
    return [v for v in values if type(v) in _SEQUENCES and not _is_fixed(v)]


def _tensors_of(modules: Iterable[nn.Module]) -> dict[Place, Tensor]:
    return {
        (id(module), name): tensor
        for module in modules
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and not is_lazy(tensor)
    }


def _held(module: nn.Module) -> list[Any]:
    """Names, identities and types of a module's attributes, children, parameters and buffers."""
    found: list[Any] = []
    for table in (vars(module), module._modules, module._parameters, module._buffers):
        if table:
            found += [*table.keys(), *map(id, table.values()), *map(type, table.values())]
    return found


def settings_of(modules: Iterable[nn.Module]) -> Hashable:
    """Hooks, and what a branch of Python would test: attributes that are bool, str, int or None.

    An int that has changed eight times is a counter and says nothing any more. Nor does a float:
    temperatures are annealed in every step.
    """
    found: list[Any] = []
    for module in modules:
        found.append(id(module))
        values = vars(module).items()
        found += [item for item in values if type(item[1]) in _FLAGS]
        numbers = [item for item in values if type(item[1]) is int]
        found += _settled(module, numbers) if numbers else ()
        found += foreign_hooks(module)
    return (*found, *process_wide_hooks())


def _settled(module: nn.Module, numbers: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those of a module's numbers that have changed no more than eight times."""
    held = _numbers.setdefault(module, {})
    found = []
    for name, value in numbers:
        before, changes = held.get(name, (value, 0))
        changes += before != value
        held[name] = value, changes
        if changes <= _MOST_CHANGES:
            found.append((name, value))
    return found


def frozen(value: Any) -> Hashable:
    """Lists and tuples all the way down; what is neither they nor plain is known by its place."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(frozen, value))
    return type(value), id(value)


def addresses_and_versions(tensors: dict[Place, Tensor]) -> dict[Place, tuple[int, int]]:
    """What changes when a tensor is replaced or written, but for writes through `.data`."""
    return {place: (tensor.data_ptr(), version_of(tensor)) for place, tensor in tensors.items()}
