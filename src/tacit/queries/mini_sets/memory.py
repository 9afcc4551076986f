"""Is a set's gradient of that set alone? Asked once a model and mode, before the first sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from tacit.batch import Batch
from tacit.errors import MixesRecords
from tacit.queries.asked_once import AskedOnce
from tacit.queries.engines.task import Task
from tacit.queries.mini_sets.set_gradients import SetGradient
from tacit.queries.remembers import Pass, remembering, remembers

Gradient = Callable[[Task, SetGradient, Batch], dict[str, Tensor]]
_asked = AskedOnce()


def refuse_memory(
    task: Task, compute: Gradient, gradient: SetGradient, sets: Sequence[Batch]
) -> None:
    """Raise MixesRecords if the first set's gradient changes once another set was seen."""
    if not sets:
        return
    key = _asked.key(task.model, tuple(task.parameters))
    if _asked.answered(task.model, key):
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
    _asked.remember(task.model, key)
