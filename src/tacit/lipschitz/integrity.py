"""Checks that a module runs the code of its class, and that this code was not replaced.

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
from tacit.torch_internals import foreign_hooks, has_gradient_hooks, process_wide_hooks, tables_of

THREE = ("output_norm", "lipschitz", "gradient_norms")
COMPOSITE = ("walk_bounds",)
_ANSWERS = frozenset([*THREE, *COMPOSITE])
# Everything that the propagation of bounds reads from a layer.
RESERVED = frozenset([*_ANSWERS, "constraints", "exact", "cotangent_limit", "jump"])

# Names that a subclass may define anew without changing what its forward computes. `__init__`
# takes no part in a pass, and `torch.compile` wraps it.
_WITHOUT_EFFECT = frozenset([
    "__init__", "__repr__", "__str__", "extra_repr", "shown", "_get_name", "reset_parameters",
    "__doc__", "__module__", "__qualname__", "__annotations__", "__annotate__", "__annotate_func__",
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
        waiting.extend(
            (joined(path, name), m) for name, m in reversed(tables_of(module).children.items())
        )


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
    owner: Any = sys.modules.get(module)
    for name in qualified.split("."):
        owner = getattr(owner, name, None)
    return owner


def answering_class(module: nn.Module) -> type:
    """The class whose code runs for this module: the one that its answers were given for.

    A subclass of ours may add new names, which take no part: its base runs. Any other class must
    not inherit answers for code that it replaced. Let C be the most derived class that replaces
    something of a base or has a forward. If a base of C has a forward and answers, then C, or a
    class derived from it, must define the answers anew. It may inherit only those of
    `Parameterless`, which follow from the Lipschitz constant, and the constant it must define.
    """
    kind = type(module)
    if ours(kind):
        return kind
    if kind.__call__ is not nn.Module.__call__:
        raise Refused("it has a __call__ of its own, which no answer is for; put it into forward")
    order = kind.__mro__
    replaced = [[] if ours(k) else _replaced(k, order[i + 1 :]) for i, k in enumerate(order)]
    first = next(
        i for i, k in enumerate(order) if ours(k) or replaced[i] or _ANSWERS & vars(k).keys()
    )
    if ours(order[first]) and gives_answers(order[first]):
        return order[first]
    at = next(i for i, k in enumerate(order) if replaced[i] or "forward" in vars(k))
    earlier = next((k for k in order[at + 1 :] if _has_forward(k) and gives_answers(k)), None)
    if earlier is not None:
        names = COMPOSITE if hasattr(kind, "walk_bounds") else THREE
        owners = {n: next(i for i, k in enumerate(order) if n in vars(k)) for n in names}
        inherited = {n: order[i] for n, i in owners.items() if i > at}
        own_answers_missing = any(base is not Parameterless for base in inherited.values())
        if own_answers_missing or inherited.keys() & {"lipschitz", *COMPOSITE}:
            what = next(iter(replaced[at]), "forward")
            raise Refused(
                f"{order[at].__name__} has a {what} of its own and the answers of "
                f"{earlier.__name__}, which are for another; give it {', '.join(names)} of its "
                "own, or derive it from nn.Module"
            )
    return kind


def _replaced(owner: type, bases: tuple[type, ...]) -> list[str]:
    """What `owner` has in the place of something of a base, answers left out."""
    names = [n for n in vars(owner) if n not in _WITHOUT_EFFECT and n not in _ANSWERS]
    return [name for name in names if any(name in vars(base) for base in bases)]


def _has_forward(kind: type) -> bool:
    return getattr(kind, "forward", nn.Module.forward) is not nn.Module.forward


def _acts(value: object) -> bool:
    return callable(value) or hasattr(type(value), "__get__")


def require_no_hidden_code(module: nn.Module, kind: type) -> None:
    """Refuse an attribute of the instance that hides code or an answer of its class."""
    tables = (vars(module), *tables_of(module)[:3])
    for name in (name for table in tables for name in table):
        own = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        answers = name in RESERVED and (ours(kind) or own is not None)
        # A user's cached property keeps its value under its own name.
        cached = isinstance(own, functools.cached_property) and not ours(kind)
        if answers or (_acts(own) and not cached):
            raise Refused(
                f"its {name} was replaced on the instance, and bounds are those of "
                f"{kind.__name__}; write a class that has this {name} and answers of its own"
            )


# What classes and modules held when Tacit was imported.
_ORIGINALS: dict[type | ModuleType, dict[str, object]] = {}


def record_original_code(kind: type) -> tuple[type | ModuleType, ...]:
    """Record the code of a class of ours, of its bases and of their files, once; return them.

    Replacing a method of a class, or a function of its file, changes every layer at once. So does
    replacing a method of another class of Tacit's in that file, such as a backward pass.
    """
    classes = [base for base in kind.__mro__ if ours(base)]
    files = [sys.modules[name] for name in sorted({base.__module__ for base in classes})]
    helpers = [
        value
        for file in files
        if file.__name__.startswith("tacit.")
        for value in vars(file).values()
        if isinstance(value, type) and value.__module__ == file.__name__
    ]
    owners: list[type | ModuleType] = [*classes, torch.nn.functional, *files, *helpers]
    for owner in owners:
        if owner not in _ORIGINALS:
            _ORIGINALS[owner] = dict(vars(owner))
    return tuple(owners)


def require_original_code(owners: Iterable[type | ModuleType]) -> None:
    """Refuse code that was replaced: one comparison of tables per class and file."""
    for owner in owners:
        before, now = _ORIGINALS[owner], vars(owner)
        if now == before:
            continue
        for name in (before | now).keys() - _WITHOUT_EFFECT:
            if now.get(name) is before.get(name):
                continue
            # A new attribute matters where it hides one of a base.
            bases = owner.__mro__[1:] if isinstance(owner, type) else ()
            hides = _acts(now.get(name)) and any(name in vars(base) for base in bases)
            if _acts(before[name]) if name in before else hides:
                raise UnboundedLayer(
                    f"{owner.__name__}.{name} was replaced after Tacit was imported, so layers do "
                    "not compute what their bounds are for; put the original back, or write a "
                    "class of your own with the three answers of tacit.lipschitz.Bounded"
                )
