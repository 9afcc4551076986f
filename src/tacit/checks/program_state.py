"""The Python state that a forward pass can read or write, taken down and put back.

To ask what a model gives *had it seen other records first*, its state must be put back: attributes
of modules and of objects that they hold, containers, tensors, closures, class attributes, and the
globals that their functions name; with all generators among them, and the process's own. Buffers
and parameters are left out: those are compared (`side_effects`), never put back. Objects of
installed packages other than modules are left out as well. State that is not reached this way
(those, slots, C extensions) stays as it is, which costs one question: whether a value was set once,
from the first records, and never again.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MOST_OBJECTS = 20_000
_MOST_ITEMS = 4_096
_MOST_BYTES = 2**26
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "tacit"}
_TABLES = ("_parameters", "_buffers")
_MISSING = object()
Restore = Callable[[], None]


class ProgramState:
    """The state that is reachable from `roots` now. `restore` puts all of it back, and
    `restore_draws` the random generators alone."""

    def __init__(self, *roots: object, device: torch.device) -> None:
        self._restores: list[Restore] = []
        self._draws = _of_the_process(device)
        self._held: dict[int, object] = {}  # by id; held, so that no id comes again
        for root in roots:
            for module in root.modules() if isinstance(root, nn.Module) else ():
                for table in _TABLES:  # compared elsewhere, and never written here
                    self._held |= {id(t): t for t in getattr(module, table).values()}
        self._todo: list[object] = list(roots)
        while self._todo and len(self._held) < _MOST_OBJECTS:
            found = self._todo.pop()
            if id(found) not in self._held:
                self._held[id(found)] = found
                self._take(found)

    def restore(self) -> None:
        for restore in self._restores:
            restore()
        self.restore_draws()

    def restore_draws(self) -> None:
        for generator in self._draws:
            generator.set(generator.state)

    def drawn(self) -> bool:
        """Whether anything was drawn since the generators were put back."""
        return any(generator.moved() for generator in self._draws)

    def _take(self, found: Any) -> None:
        if isinstance(found, Tensor):
            self._take_tensor(found)
        elif isinstance(found, np.ndarray):
            if found.nbytes <= _MOST_BYTES and found.dtype != object:
                self._restores.append(_array_restore(found))
        elif isinstance(found, dict):
            self._restores.append(_dict_restore(found))
            self._add(found.values())
        elif isinstance(found, list | deque | set):
            self._restores.append(_container_restore(found))
            self._add(found)
        elif isinstance(found, tuple | frozenset):
            self._add(found)
        elif isinstance(found, FunctionType):
            self._take_function(found)
        elif isinstance(found, MethodType):
            self._todo += [found.__func__, found.__self__]
        elif isinstance(found, staticmethod | classmethod):
            self._todo.append(found.__func__)
        elif isinstance(found, property):
            self._todo += [found.fget, found.fset]
        elif isinstance(found, type):
            self._take_class(found)
        elif (generator := _Generator.of(found)) is not None:
            self._draws.append(generator)
        elif not isinstance(found, ModuleType):
            self._take_instance(found)

    def _add(self, values: Any) -> None:
        if len(values) <= _MOST_ITEMS:
            self._todo += [v for v in values if not isinstance(v, str | bytes | int | float)]

    def _take_tensor(self, tensor: Tensor) -> None:
        # A tensor that was kept inside vmap has no storage, and is bound anew like any other value.
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or _escaped(tensor):
            return
        if tensor.numel() * tensor.element_size() <= _MOST_BYTES:
            saved = tensor.detach().clone()

            def restore() -> None:
                if tensor.shape == saved.shape:
                    tensor.data.copy_(saved)

            self._restores.append(restore)

    def _take_function(self, function: FunctionType) -> None:
        self._todo += [function.__defaults__, function.__kwdefaults__, function.__dict__]
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            self._restores.append(_attribute_restore(cell, "cell_contents", value))
            self._todo.append(value)
        if _of_a_library(function.__module__):
            return
        table, names = function.__globals__, set(_names(function.__code__))
        for name in names:
            value = table.get(name, _MISSING)
            self._restores.append(_item_restore(table, name, value))
            if isinstance(value, ModuleType) and not _of_a_library(value.__name__):
                for inner in names & vars(value).keys():
                    self._restores.append(_item_restore(vars(value), inner, vars(value)[inner]))
                    self._todo.append(vars(value)[inner])
            elif value is not _MISSING:
                self._todo.append(value)

    def _take_class(self, kind: type) -> None:
        if _of_a_library(kind.__module__):
            return
        for name, value in list(vars(kind).items()):
            if not name.startswith("__") or callable(value):
                self._todo.append(value)
            if not name.startswith("__"):
                self._restores.append(_attribute_restore(kind, name, value))
        self._todo += kind.__bases__

    def _take_instance(self, found: Any) -> None:
        library = _of_a_library(type(found).__module__)
        if library and not isinstance(found, nn.Module) and not _of_tacit(found):
            # Of a library's objects, those that hold a user's functions.
            self._todo += [getattr(found, n, None) for n in ("__wrapped__", "func", "keywords")]
            return
        self._todo.append(type(found))
        attributes = getattr(found, "__dict__", None)
        if isinstance(attributes, dict):
            if isinstance(found, nn.Module):
                self._held |= {id(t): t for t in (attributes.get(n) for n in _TABLES)}
            self._todo.append(attributes)


def _of_a_library(module: str | None) -> bool:
    """Whether it is installed code, whose loggers and queues must not be turned back."""
    return _installed((module or "builtins").split(".")[0])


@functools.cache
def _installed(package: str) -> bool:
    if package in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _of_tacit(found: object) -> bool:
    return type(found).__module__.split(".")[0] == "tacit"


def _escaped(tensor: Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    """Global names and attributes that a function's code, and code inside it, mentions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _dict_restore(found: dict) -> Restore:
    saved = dict(found)

    def restore() -> None:
        for key in found.keys() - saved.keys():
            del found[key]
        for key, value in saved.items():
            if found.get(key, _MISSING) is not value:
                found[key] = value

    return restore


def _item_restore(table: dict, name: str, value: object) -> Restore:
    def restore() -> None:
        if value is _MISSING:
            table.pop(name, None)
        elif table.get(name, _MISSING) is not value:
            table[name] = value

    return restore


def _container_restore(found: list | deque | set) -> Restore:
    saved = list(found)

    def restore() -> None:
        same = len(found) == len(saved) and all(a is b for a, b in zip(found, saved, strict=True))
        if not same:
            found.clear()
            (found.update if isinstance(found, set) else found.extend)(saved)

    return restore


def _array_restore(found: np.ndarray) -> Restore:
    saved = found.copy()

    def restore() -> None:
        if found.flags.writeable:
            found[...] = saved

    return restore


def _attribute_restore(holder: Any, name: str, value: object) -> Restore:
    def restore() -> None:
        now = vars(holder).get(name, _MISSING) if isinstance(holder, type) else _get(holder, name)
        if now is not value:
            setattr(holder, name, value)

    return restore


def _get(holder: object, name: str) -> object:
    try:
        return getattr(holder, name)
    except ValueError:  # a cell that was emptied
        return _MISSING


@dataclass(frozen=True)
class _Generator:
    """A source of random draws and where it stood."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    state: Any

    @classmethod
    def of(cls, found: Any) -> _Generator | None:
        if isinstance(found, torch.Generator):
            return cls.now(found.get_state, found.set_state)
        if isinstance(found, np.random.RandomState):
            return cls.now(found.get_state, found.set_state)
        if isinstance(found, np.random.Generator):
            bits: Any = found.bit_generator
            return cls.now(lambda: bits.state, lambda state: setattr(bits, "state", state))
        if isinstance(found, random.Random):
            return cls.now(found.getstate, found.setstate)
        return None

    @classmethod
    def now(cls, get: Callable[[], Any], set: Callable[[Any], Any]) -> _Generator:
        return cls(get, set, get())

    def moved(self) -> bool:
        return _as_bytes(self.get()) != _as_bytes(self.state)


def _as_bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


def _of_the_process(device: torch.device) -> list[_Generator]:
    """PyTorch's on the CPU and on the records' device, NumPy's and Python's."""
    found = [
        _Generator.now(torch.get_rng_state, torch.set_rng_state),
        _Generator.now(lambda: np.random.get_state(legacy=False), np.random.set_state),
        _Generator.now(random.getstate, random.setstate),
    ]
    if device.type == "cuda":
        found.append(
            _Generator.now(
                lambda: torch.cuda.get_rng_state(device),
                lambda state: torch.cuda.set_rng_state(state, device),
            )
        )
    return found
