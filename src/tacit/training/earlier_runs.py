"""Which ledgers the weights of a model have been charged to, in this process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Hashable, Iterator

from torch import nn

from tacit.accounting.ledger import Ledger

TRAINED_BEFORE = (
    "these weights were trained before, by a run that this epsilon does not count; where the "
    "records are the same, give both runs one ledger"
)
TRAINED_HERE = (
    "these weights were trained before, by another run of this ledger: epsilon is this run's "
    "alone, and the ledger's statement counts both"
)

_LEDGERS: weakref.WeakKeyDictionary[nn.Module, set[tuple[Hashable, int]]] = (
    weakref.WeakKeyDictionary()
)


def ledger_key(given: Ledger | str | os.PathLike[str] | None) -> Hashable:
    """The same for one ledger: its file, or itself in memory. None is a new ledger each time."""
    path = given.path if isinstance(given, Ledger) else given
    if path is not None:
        return os.path.realpath(path)
    return weakref.ref(given) if isinstance(given, Ledger) else object()


def remember_run(model: nn.Module, key: Hashable, run: int) -> None:
    """Note that the model's weights are trained by this run of this ledger."""
    for module in _with_weights(model):
        _LEDGERS.setdefault(module, set()).add((key, run))


def trained_elsewhere(model: nn.Module, key: Hashable) -> bool:
    """Whether some of the model's weights were trained on another ledger. Copies are not known."""
    return any(known != key for known, _ in _runs_of(model))


def trained_by_another_run(model: nn.Module, key: Hashable, run: int) -> bool:
    """Whether some of the model's weights were trained by another run of this ledger."""
    return any(known == key and other != run for known, other in _runs_of(model))


def _runs_of(model: nn.Module) -> Iterator[tuple[Hashable, int]]:
    for module in _with_weights(model):
        yield from _LEDGERS.get(module, ())


def _with_weights(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with weights of their own: a model may be wrapped, or built around them, anew."""
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield module
