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

_LEDGERS: weakref.WeakKeyDictionary[nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()


def ledger_key(given: Ledger | str | os.PathLike[str] | None) -> Hashable:
    """The same for one ledger: its file, or itself in memory. None is a new ledger each time."""
    path = given.path if isinstance(given, Ledger) else given
    if path is not None:
        return os.path.realpath(path)
    return weakref.ref(given) if isinstance(given, Ledger) else object()


def remember_run(model: nn.Module, key: Hashable) -> None:
    """Note that the model's weights are trained by a run on this ledger."""
    for module in _with_weights(model):
        _LEDGERS.setdefault(module, set()).add(key)


def trained_elsewhere(model: nn.Module, key: Hashable) -> bool:
    """Whether some of the model's weights were trained on another ledger. Copies are not known."""
    return any(_LEDGERS.get(module, set()) - {key} for module in _with_weights(model))


def _with_weights(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with weights of their own: a model may be wrapped, or built around them, anew."""
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield module
