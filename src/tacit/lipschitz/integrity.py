"""Checks that a module computes what its class computes, and the class what it did when imported.

A class answers for its own code. Four things can make a module differ from it, and each is refused:
hooks, attributes of the instance that hide those of the class, a subclass that changes code and
inherits answers given for other code, and code that was replaced on the class after Tacit was
imported. PyTorch's functions and tensors are trusted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch.nn.functional
from torch import nn

from tacit.errors import Refused, UnboundedLayer
from tacit.lipschitz.bounds import Parameterless
from tacit.torch_internals import foreign_hooks, has_gradient_hooks, process_wide_hooks

THREE = ("output_norm", "lipschitz", "gradient_norms")
COMPOSITE = ("walk_bounds",)
# Everything that the propagation of bounds reads from a layer.
RESERVED = frozenset([*THREE, *COMPOSITE, "constraints", "exact", "cotangent_limit", "jump"])

# Names that a subclass may define anew without changing what its forward computes.
_WITHOUT_EFFECT = frozenset([
    "__init__", "__repr__", "__str__", "extra_repr", "_get_name", "reset_parameters", "__doc__",
    "__module__", "__qualname__", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__classdictcell__", "__dict__", "__weakref__", "__constants__",
    "__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__",
    "__abstractmethods__", "_abc_impl", "__jit_unused_properties__", "__init_subclass__",
    "__subclasshook__", "__getstate__", "__setstate__", "__deepcopy__", "__reduce__",
    "__reduce_ex__",
])  # fmt: skip


def members(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with its path, read from PyTorch's tables.

    `named_modules` is a method, which a class may override.
    """
    waiting: list[tuple[str, Any]] = [("", model)]
    seen: set[int] = set()
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen or not isinstance(module, nn.Module):
            continue
        seen.add(id(module))
        yield path, module
        waiting.extend((joined(path, name), m) for name, m in reversed(module._modules.items()))


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def place(path: str, kind: type) -> str:
    return f"layer {path or 'model'!r} ({kind.__name__})"


def require_no_hooks_of_all_modules() -> None:
    """Refuse hooks that PyTorch runs for every module of the process."""
    for hook in process_wide_hooks().values():
        raise UnboundedLayer(
            f"no module has a gradient bound: {getattr(hook, '__qualname__', hook)} was registered "
            "as a hook of all modules of the process, which may change anything; remove it"
        )


def require_no_hooks(model: nn.Module) -> None:
    """Refuse hooks that are not Tacit's: they may change any value, forwards or backwards."""
    require_no_hooks_of_all_modules()
    for path, module in members(model):
        if foreign_hooks(module):
            raise UnboundedLayer(
                f"{place(path, type(module))} has no gradient bound: it has hooks, which may "
                "change anything; remove them, or make what they do a layer with the three answers "
                "of tacit.lipschitz.Bounded"
            )


def require_plain_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse a trainable parameter with hooks: they change a gradient after it was bounded."""
    for name, parameter in parameters:
        if parameter.requires_grad and has_gradient_hooks(parameter):
            raise UnboundedLayer(
                f"parameter {name!r} has hooks, which may change its gradient after it was "
                "bounded; remove them, and change the gradient once it is released"
            )


def gives_answers(kind: type) -> bool:
    """Whether the class gives answers. Attributes of an instance do not count."""
    return all(hasattr(kind, n) for n in COMPOSITE) or all(hasattr(kind, n) for n in THREE)


def ours(kind: type) -> bool:
    """Whether this class is Tacit's or torch.nn's, and found under its name in its module."""
    module = kind.__module__
    return module.startswith(("tacit.", "torch.nn.")) and _named(module, kind.__qualname__) is kind


@functools.cache
def _named(module: str, qualified: str) -> object:
    found: Any = sys.modules.get(module)
    for name in qualified.split("."):
        found = getattr(found, name, None)
    return found


def answering_class(module: nn.Module) -> type:
    """The class whose code runs for this module: the one that its answers were given for.

    It is the first class in the method resolution order that is ours or that defines forward or an
    answer. A subclass of ours may only add new names, which take no part in the computation.
    Raises `Refused` for a subclass that changes code and inherits the answers.
    """
    kind = type(module)
    if ours(kind):
        return kind
    if kind.__call__ is not nn.Module.__call__:
        raise Refused("it has a __call__ of its own, which no answer is for; put it into forward")
    names = ("forward", *THREE, *COMPOSITE)
    order = kind.__mro__
    base = next(k for k in order if ours(k) or any(n in vars(k) for n in names))
    if ours(base) and gives_answers(base):
        for owner in order[: order.index(base)]:
            for name in vars(owner):
                if name in _WITHOUT_EFFECT or not hasattr(base, name):
                    continue
                raise Refused(
                    f"{owner.__name__}.{name} takes the place of what {base.__name__} has, and "
                    f"{base.__name__} answers for its own code; give {owner.__name__} a forward "
                    f"and {', '.join(_names(kind))} of its own, or give {name} another name"
                )
        return base
    _require_own_answers(kind)
    return kind


def _require_own_answers(kind: type) -> None:
    """Refuse a class that changes code of a base and inherits the answers of that base.

    Let C be the most derived class that replaces code of a base, forward or a helper. If a base of
    C has both a forward and answers, those answers are for the old code. So C, or a class derived
    from it, must define the answers anew. It may inherit those of `Parameterless` alone, which
    follow from the Lipschitz constant, and that it must define.
    """
    order = kind.__mro__
    changed = [i for i, base in enumerate(order) if not ours(base) and _code(base, order[i + 1 :])]
    at = min([i for i, base in enumerate(order) if "forward" in vars(base)][:1] + changed)
    earlier = next((b for b in order[at + 1 :] if _has_forward(b) and gives_answers(b)), None)
    if earlier is None:
        return
    names = _names(kind)
    owners = {n: next((i for i, b in enumerate(order) if n in vars(b)), at) for n in names}
    inherited = {n: order[i] for n, i in owners.items() if i > at}
    own_answers_missing = any(base is not Parameterless for base in inherited.values())
    if own_answers_missing or inherited.keys() & {"lipschitz", *COMPOSITE}:
        what = next(iter(_code(order[at], order[at + 1 :])), "forward")
        raise Refused(
            f"{order[at].__name__} has a {what} of its own and the answers of "
            f"{earlier.__name__}, which are for another; give it {', '.join(names)} of its own, or "
            "derive it from nn.Module"
        )


def _names(kind: type) -> tuple[str, ...]:
    return COMPOSITE if hasattr(kind, "walk_bounds") else THREE


def _has_forward(kind: type) -> bool:
    return any("forward" in vars(base) for base in kind.__mro__ if base is not nn.Module)


def _code(owner: type, bases: tuple[type, ...]) -> list[str]:
    """The functions and descriptors of `owner` that override something of a base."""
    return [
        name
        for name, value in vars(owner).items()
        if name not in _WITHOUT_EFFECT and name not in (*THREE, *COMPOSITE) and _acts(value)
        if any(name in vars(base) for base in bases)
    ]


def _acts(value: object) -> bool:
    return callable(value) or hasattr(type(value), "__get__")


def require_no_hidden_code(module: nn.Module, kind: type) -> None:
    """Refuse an attribute of the instance that hides code or an answer of its class."""
    tables = (vars(module), module._parameters, module._buffers, module._modules)
    for name in (name for table in tables for name in table):
        if name in RESERVED and (ours(kind) or hasattr(kind, name)):
            hidden = True
        else:
            own = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
            # A cached property keeps its value under its own name.
            hidden = _acts(own) and (ours(kind) or not isinstance(own, functools.cached_property))
        if hidden:
            raise Refused(
                f"its {name} was replaced on the instance, and bounds are those of "
                f"{kind.__name__}; write a class that has this {name} and answers of its own"
            )


class Originals:
    """The code of layer classes as it was when Tacit was imported.

    Replacing a method of a class, or a function of its module, changes every layer at once. The
    check in each step is one comparison of addresses per class and module.
    """

    def __init__(self) -> None:
        self._code: dict[type | ModuleType, dict[str, object]] = {}
        self._values: dict[type | ModuleType, tuple[object, ...]] = {}

    def remember(self, kind: type) -> tuple[type | ModuleType, ...]:
        """Remember the code of a class of ours, its bases and their modules, once."""
        owners: list[type | ModuleType] = [k for k in kind.__mro__ if ours(k)]
        files = {k.__module__ for k in kind.__mro__ if ours(k)}
        owners += [torch.nn.functional, *(sys.modules[name] for name in sorted(files))]
        for owner in owners:
            if owner not in self._code:
                # Without __init__, which takes no part in a pass; `torch.compile` wraps it.
                named = vars(owner).items()
                self._code[owner] = {
                    n: v for n, v in named if _acts(v) and n not in _WITHOUT_EFFECT
                }
                self._values[owner] = tuple(vars(owner).values())
        return tuple(owners)

    def require_unchanged(self, owners: Iterable[type | ModuleType]) -> None:
        for owner in owners:
            if tuple(vars(owner).values()) == self._values[owner]:
                continue
            before, now = self._code[owner], vars(owner)
            for name in (*before, *now):
                if name in before and now.get(name) is not before[name]:
                    self._refuse(owner, name)
                # A new attribute of a class may hide one of its bases.
                if isinstance(owner, type) and name not in before and _hides(owner, name):
                    self._refuse(owner, name)

    def _refuse(self, owner: type | ModuleType, name: str) -> None:
        raise UnboundedLayer(
            f"{owner.__name__}.{name} was replaced after Tacit was imported, so layers do not "
            "compute what their bounds are for; put the original back, or write a class of your "
            "own with the three answers of tacit.lipschitz.Bounded"
        )


def _hides(owner: type, name: str) -> bool:
    acts = name not in _WITHOUT_EFFECT and _acts(vars(owner)[name])
    return acts and any(name in vars(base) for base in owner.__mro__[1:])


ORIGINALS = Originals()
