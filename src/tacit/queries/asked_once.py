"""A question that is asked of a model once, and again when its modes or hooks are others."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from torch import nn

from tacit.foreign_hooks import foreign_hooks, process_wide_hooks

_MOST_ANSWERS = 64


class AskedOnce:
    """Remembers of which models, seen how, the answer was good. Models are not kept alive."""

    def __init__(self) -> None:
        self._answered: weakref.WeakKeyDictionary[nn.Module, set[Hashable]] = (
            weakref.WeakKeyDictionary()
        )

    def key(self, model: nn.Module, more: Hashable) -> Hashable:
        """In evaluation mode a norm may keep apart what it mixes in training; hooks do anything."""
        modules = tuple((m.training, *foreign_hooks(m)) for m in model.modules())
        return more, modules, tuple(process_wide_hooks())

    def answered(self, model: nn.Module, key: Hashable) -> bool:
        return key in self._answered.get(model, ())

    def remember(self, model: nn.Module, key: Hashable) -> None:
        known = self._answered.setdefault(model, set())
        if len(known) >= _MOST_ANSWERS:  # somebody registers hooks anew in each step
            known.clear()
        known.add(key)
