"""Is a set's gradient of that set alone? Asked once a model and mode, before the first sum."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from tacit.batch import Batch
from tacit.errors import MixesRecords
from tacit.foreign_hooks import foreign_hooks, process_wide_hooks
from tacit.queries.engines.task import Task
from tacit.queries.mini_sets.set_gradients import SetGradient
from tacit.queries.remembers import Pass, remembering, remembers

Gradient = Callable[[Task, SetGradient, Batch], dict[str, Tensor]]
_MOST_KEYS = 64
_asked: weakref.WeakKeyDictionary[nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()


def refuse_memory(
    task: Task, compute: Gradient, gradient: SetGradient, sets: Sequence[Batch]
) -> None:
    """Raise MixesRecords if the first set's gradient changes once another set was seen."""
    if not sets:
        return
    modules = tuple((m.training, *foreign_hooks(m)) for m in task.model.modules())
    key = (tuple(task.parameters), modules, tuple(process_wide_hooks()))
    done = _asked.setdefault(task.model, set())
    if key in done:
        return

    def of(one: Batch) -> Pass:
        def run(model: nn.Module) -> dict[str, Tensor]:
            held = dict(model.named_parameters())
            parameters = {name: held[name] for name in task.parameters}
            return compute(replace(task, model=model, parameters=parameters), gradient, one)

        return run

    other = of(sets[-1]) if len(sets) > 1 else None
    if remembers(task.model, of(sets[0]), other, sets[0].indices.device):
        raise MixesRecords(remembering(task.model))
    if len(done) >= _MOST_KEYS:  # somebody registers hooks anew in each step
        done.clear()
    done.add(key)
