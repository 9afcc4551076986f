"""`Automatic`, the engine that is used where none is named: book-keeping, recorded where that pays.

`ClippingStep` turns one clipping step into a function of tensors, which a `Recorder` can repeat.
Poisson batches have many sizes, and every size would need a plan and a recording of its own, so
`rows_for` and `padded` bring them to a few sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tacit.engines.book_keeping import BookKeeping, planned_program, record_gradients
from tacit.engines.clipping import Clipped, ClipTask, clip_and_sum, flattened
from tacit.engines.draws import State
from tacit.engines.programs import ProgramChanged
from tacit.engines.recorder import Outputs, Recorder
from tacit.engines.rules import NotFinite
from tacit.pytrees import Tree, map_tensors, tensors_of
from tacit.sampling.sampler import Batch
from tacit.torch_internals import swapped

_SHAPES_PER_OCTAVE = 16
_PIECES = 8


class Automatic(BookKeeping):
    """`BookKeeping`, with steps that are captured and compiled where that pays (`Recorder`).

    Batches are padded to a few sizes, and padding rows are masked out of the sums. The sums are
    those of `BookKeeping` up to the rounding of their order.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        super().__init__()
        self.recorder = recorder or Recorder()

    def clipped_sums(self, task: ClipTask, piece: Batch) -> Clipped:
        if len(piece) == 0:
            return Clipped()
        if self.runs_one_by_one(task):  # padding would only add records
            return super().clipped_sums(task, piece)
        if piece.mask is None:  # whoever made a mask has chosen the batch's shape
            piece = padded(piece, rows_for(piece, task.views))
        inputs, targets = piece.inputs, piece.targets
        plan = self.single_plan(task, inputs, targets)
        if plan is None:
            return self.clipped_sums_of(task, inputs, targets, piece.mask)

        def work(task: ClipTask, inputs: Tree, targets: Tree, mask: Tensor) -> Clipped:
            losses, graph, signature = planned_program(task, inputs, targets, plan.fused_functions)
            if signature != plan.signature:
                raise ProgramChanged("the model ran other operators than those that were planned")
            gradients = record_gradients(plan, graph, losses, task)
            return clip_and_sum(task, gradients, plan.num_records, mask.device, mask)

        start = State(inputs, task.model, plan.rewrites)
        try:
            return ClippingStep(task, inputs, targets, work).through(self.recorder, piece.mask)
        except (ProgramChanged, NotFinite):  # another path through the model needs its own plan
            start.restore()
            return self.clipped_sums_of(task, inputs, targets, piece.mask)

    def expect(self, steps: int) -> None:
        """Announce how many steps are still to come; see `Recorder.expect`."""
        self.recorder.expect(steps)

    def forget(self) -> None:
        """Free the recordings' memory; later steps are recorded again."""
        self.recorder.forget()


@dataclass
class ClippingStep:
    """A step that can be recorded: `work` as a function of records, mask, constants and weights.

    `work` clips and sums the gradients of records or mini-sets.
    """

    task: ClipTask
    inputs: Tree
    targets: Tree
    work: Callable[[ClipTask, Tree, Tree, Tensor], Clipped]

    def through(self, recorder: Recorder, mask: Tensor | None = None) -> Clipped:
        found = recorder(self, self.batch(mask))
        parameters, flat = self.task.parameters, found["sums"]
        parts = flat.split([p.numel() for p in parameters.values()])
        pairs = zip(parameters.items(), parts, strict=True)
        sums = {name: part.view_as(p) for (name, p), part in pairs}
        names = [f"#{h}" for h in range(len(self.task.blocks))]
        return Clipped(sums, tuple(found[name] for name in names if name in found), flat)

    @property
    def model(self) -> nn.Module:
        return self.task.model

    @property
    def key(self) -> Hashable:
        task = self.task
        masks = tuple((name, mask.data_ptr()) for name, mask in task.active.items())
        structure = repr(map_tensors(lambda t: None, (self.inputs, self.targets)))
        asked = (id(task.loss), tuple(task.parameters), task.blocks, structure)
        return asked, task.rule, task.views, task.counted, task.factors is None, masks

    def batch(self, mask: Tensor | None) -> list[Tensor]:
        """Everything that changes from step to step. A Python number would become a constant."""
        leaves = tensors_of((self.inputs, self.targets))
        device = leaves[0].device
        rows = len(leaves[0]) // self.task.views
        keep = torch.ones(rows, dtype=torch.bool, device=device)
        constants = torch.tensor(
            [float(c) for c in (*self.task.norms, *(self.task.factors or ()))], dtype=torch.float64
        )
        if device.type == "cuda":
            constants = constants.pin_memory().to(device, non_blocking=True)
        return [*leaves, keep if mask is None else mask[:: self.task.views], constants]

    def run(self, batch: Sequence[Tensor]) -> Outputs:
        return self._run(self.task, batch)

    def run_with(self, weights: dict[str, Tensor], batch: Sequence[Tensor]) -> Outputs:
        parameters: Any = {name: weights[name] for name in self.task.parameters}
        with swapped(self.model, weights):
            return self._run(replace(self.task, parameters=parameters), batch)

    def _run(self, task: ClipTask, batch: Sequence[Tensor]) -> Outputs:
        *leaves, mask, constants = batch
        each, of_norms = constants.unbind(), len(task.norms)
        factors = None if task.factors is None else each[of_norms:]
        task = replace(task, norms=each[:of_norms], factors=factors)
        following = iter(leaves)
        inputs, targets = map_tensors(lambda t: next(following), (self.inputs, self.targets))
        found = self.work(task, inputs, targets, mask)
        counts = {f"#{h}": count for h, count in enumerate(found.counts)}
        return {"sums": flattened(found.sums, task.parameters)} | counts


def rows_for(piece: Batch, views: int = 1) -> int:
    """The smallest of a few sizes that holds the piece, in rows of whole records.

    Every size is planned and compiled once. A batch of about the expected size B gets one of three:
    B, B + 1.5·√B or B + 4·√B. A Poisson batch needs them in 50, 43 and 7% of all steps, so padding
    is 6% of B at B = 256 and 3% at 1,024. Where a batch is cut, the last piece has one of eight
    sizes; other batches have sixteen per octave.
    """
    records, expected, most = math.ceil(len(piece) / views), piece.divisor, piece.max_physical
    if most is not None and len(piece) <= most < expected * views:
        part = views * math.ceil(most / (_PIECES * views))
        return min(part * math.ceil(len(piece) / part), most)
    sizes = [math.ceil(expected + k * math.sqrt(expected)) for k in (0.0, 1.5, 4.0)]
    size = next((size for size in sizes if records <= size <= 2 * records), 0)
    if size == 0 or expected < _SHAPES_PER_OCTAVE:
        grid = max(1, 2 ** (records.bit_length() - 1) // _SHAPES_PER_OCTAVE)
        size = grid * math.ceil(records / grid)
    rows = views * size
    return rows if most is None else min(rows, max(most, len(piece)))


def padded(piece: Batch, rows: int) -> Batch:
    """The same records, padded with the dataset's first record in rows that are masked out."""
    missing = rows - len(piece)
    if missing == 0:
        return piece
    place = torch.arange(rows, device=piece.indices.device)
    indices = pad(piece.indices, (0, missing))
    return replace(piece, indices=indices, mask=place < len(piece), groups=None)
