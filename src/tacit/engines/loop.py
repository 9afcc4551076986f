"""Every record alone through the model: slower than any rule, and exact for any program.

Each record is a batch of its own, so that no operator can bring two of them together. An engine
comes here with operators that shadow memory or the rules do not know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tacit.checks.certificate import Event, require_no_memory
from tacit.engines.clipping import Clipped, Task
from tacit.engines.draws import State
from tacit.engines.gradients import RecordGradients, Stacked, clipped, norms_of_blocks
from tacit.engines.shadow_events import SourceLines, operator_name
from tacit.losses.record_losses import losses_of
from tacit.precision import wide
from tacit.pytrees import Tree, call_model, map_tensors, take_rows, tensors_of
from tacit.sampling.batch import Batch
from tacit.torch_internals import Operators, gradients, uncompiled


def gradients_alone(task: Task, inputs: Tree, targets: Tree) -> dict[str, RecordGradients]:
    """Each record's gradient by a forward and a backward pass over its rows alone."""
    num_records = len(tensors_of(inputs)[0]) // task.views
    parameters = list(task.parameters.values())
    stacks: list[list[Tensor]] = [[] for _ in parameters]
    buffers, written = State(None, task.model), frozenset[str]()
    for record in range(num_records):
        written = buffers.changed() if record == 1 else written
        buffers.restore(written)  # every record meets the model as the first one did
        total = _loss_alone(task, inputs, targets, record)
        grads: tuple[Tensor | None, ...] = (None,) * len(parameters)
        if total.requires_grad:
            ones = torch.ones_like(total)
            grads = gradients([total], parameters, [ones], retain_graph=False)
        for stack, parameter, grad in zip(stacks, parameters, grads, strict=True):
            row = torch.zeros_like(parameter, requires_grad=False) if grad is None else grad
            stack.append(wide(row.to_dense() if row.is_sparse else row))
    found: dict[str, RecordGradients] = {}
    for (name, _), stack in zip(task.parameters.items(), stacks, strict=True):
        rows = torch.stack(stack)
        mask = task.active.get(name)
        found[name] = Stacked(rows if mask is None else torch.where(mask, rows, 0.0))
    return found


def _loss_alone(task: Task, inputs: Tree, targets: Tree, record: int) -> Tensor:
    """The mean over a record's views, each a batch of its own."""
    losses, read, lines = [], list[Event](), SourceLines()

    def note(func: Any, _: Tensor) -> None:
        read.append(Event(operator_name(func), lines.where()))

    for row in range(record * task.views, (record + 1) * task.views):
        # In memory of its own: what a model keeps of one record is not the next one's.
        x, y = map_tensors(torch.clone, take_rows((inputs, targets), slice(row, row + 1)))
        operators = Operators(tensors_of((x, y)), note)
        with torch.enable_grad(), uncompiled(), operators:
            losses.append(losses_of(task.loss, call_model(task.model, x), y).sum())
        if operators.has_left_behind(losses[-1]):
            require_no_memory(read[0], task.model)
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


class PerRecord:
    """An engine that runs every record alone, for models in which records would meet in a batch.

    A branch on the values of a batch, padding to its longest record or statistics of the batch
    then depend on one record alone. The sums are exact; a step takes one pass per record.
    """

    alone = True

    def clipped_sums(self, task: Task, piece: Batch) -> Clipped:
        if len(piece) == 0:
            return Clipped()
        found = gradients_alone(task, piece.inputs, piece.targets)
        mask = None if piece.mask is None else piece.mask[:: task.views]
        return clipped(task, found, len(piece) // task.views, piece.indices.device, mask)

    def block_norms(self, task: Task, piece: Batch) -> list[Tensor]:
        found = gradients_alone(task, piece.inputs, piece.targets)
        return norms_of_blocks(task, found, len(piece) // task.views, piece.indices.device)
