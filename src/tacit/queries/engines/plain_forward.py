"""Is a forward pass that a user wrote the same work each time? Read from its code, not run.

A recording repeats kernels. What Python does besides (draws, counts, reads that may change) would
stay as it was when it was recorded. So a method passes only if its code names nothing but
  its own arguments and constants,
  layers, parameters, buffers and plain settings of its module, which a recording's key holds,
  PyTorch, `math` and a few builtins, and there nothing that draws,
calls no method that writes in place, and stores nothing outside itself. A branch on a tensor's
value passes here and stops the recording.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_NAMESPACES = (torch, torch.nn, torch.nn.functional, math)
_BUILTINS = frozenset(
    (abs, enumerate, float, int, isinstance, len, list, max, min, range, reversed, sum, super)
) | {tuple, zip}
_DRAWS = (
    "bernoulli",
    "cauchy",
    "enerator",
    "exponential",
    "geometric",
    "multinomial",
    "normal_",
    "poisson",
    "rand",
    "rng_state",
    "seed",
    "uniform",
)
_STORES = frozenset(["STORE_GLOBAL", "STORE_ATTR", "STORE_NAME", "STORE_DEREF", "DELETE_ATTR"])
_LOADS_ATTRIBUTE = frozenset(["LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"])
_OUTSIDE = frozenset(["IMPORT_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_NAME"])
_NOT_CALLED = frozenset(["__init__", "__repr__", "extra_repr", "__module__", "__doc__"])


def plain_forward(module: nn.Module) -> bool:
    """Whether every method of the module's class is the same work each time; `__init__` is not run.

    Only for classes that derive from `nn.Module` itself: others inherit code that is not read.
    """
    kind: Any = type(module)
    attributes = _attributes_of(kind)
    # An attribute may be asked of a part as well as of the module itself.
    return attributes is not None and all(
        _held(part, name) for part in module.modules() for name in attributes
    )


@functools.cache
def _attributes_of(kind: type) -> frozenset[str] | None:
    """The names that the class's code asks objects for; None where it is not all plain."""
    if kind.__bases__ != (nn.Module,) or "__getattr__" in vars(kind):
        return None
    own = {name: value for name, value in vars(kind).items() if name not in _NOT_CALLED}
    methods = [value for value in own.values() if isinstance(value, FunctionType)]
    values = [v for n, v in own.items() if not isinstance(v, FunctionType) and n[:2] != "__"]
    if not all(map(_method_is_plain, methods)) or not all(map(_is_plain, values)):
        return None
    names = (name for method in methods for name in _attributes(method))
    return frozenset([*names, *(method.__name__ for method in methods)])


def _held(module: nn.Module, name: str) -> bool:
    """Not an attribute of this module, or one whose value a recording's key holds."""
    return name not in vars(module) or _is_plain(vars(module)[name])


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _method_is_plain(method: FunctionType) -> bool:
    free = [name for name in method.__code__.co_freevars if name != "__class__"]
    defaults = [*(method.__defaults__ or ()), *(method.__kwdefaults__ or {}).values()]
    if free or not all(map(_is_plain, defaults)):
        return False
    return all(_code_is_plain(code, method) for code in _codes(method.__code__))


def _code_is_plain(code: CodeType, method: FunctionType) -> bool:
    for step in dis.get_instructions(code):
        name = str(step.argval)
        if step.opname in _STORES or (step.opname in _OUTSIDE and name != "__class__"):
            return False
        if step.opname == "LOAD_GLOBAL" and not _known_global(name, method):
            return False
        if step.opname in _LOADS_ATTRIBUTE and (_draws(name) or _writes(name)):
            return False
    return True


def _known_global(name: str, method: FunctionType) -> bool:
    if name not in method.__globals__:
        value = getattr(builtins, name, None)
        return isinstance(value, type | type(len)) and value in _BUILTINS
    value = method.__globals__[name]
    if any(value is known for known in _NAMESPACES):
        return True
    origin = getattr(value, "__module__", None) or ""
    from_torch = callable(value) and origin.split(".")[0] == "torch"
    return (value is Tensor or from_torch) and not _draws(name)


def _draws(name: str) -> bool:
    return name == "normal" or any(draw in name for draw in _DRAWS)


def _writes(name: str) -> bool:
    """In place, perhaps to a buffer: then rehearsals of a recording would count as steps."""
    return name.endswith("_") and not name.startswith("_") and name != "relu_"


def _attributes(method: FunctionType) -> Iterator[str]:
    for code in _codes(method.__code__):
        for step in dis.get_instructions(code):
            if step.opname in _LOADS_ATTRIBUTE:
                yield str(step.argval)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of functions and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
