"""Gradients of mini-sets: the vector g(w; S) of each set, and the clipped sum over several sets.

Clipping bounds whatever g returns, so g may be any function of the weights and of the records of
*one* mini-set [Nguyen 2023, Eq. 6]. It must not read another set, or keep anything of an earlier
one. An engine computes the clipped sum set by set, or all sets at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tacit.engines.book_keeping import Automatic, run_recorded
from tacit.engines.clipping import (
    Clipped,
    ClipTask,
    Engine,
    RecordGradients,
    RowScale,
    Stacked,
    clip_and_sum,
    norms_of_blocks,
    sum_dtype,
)
from tacit.engines.pass_state import from_one_start
from tacit.engines.plain_programs import plain_program
from tacit.engines.recorder import Recorder
from tacit.errors import UnsupportedEvent, UnsupportedModule
from tacit.losses.record_loss import losses_of
from tacit.precision import wide
from tacit.pytrees import Tree, call_model, device_of, map_tensors, num_rows, take_rows
from tacit.queries.bounded_gradient import Loss
from tacit.sampling.mini_sets import MiniSets
from tacit.sampling.sampler import Batch, batch_of
from tacit.torch_internals import swapped


def require_sets(batch: Batch, size: int) -> None:
    """Raise UnsupportedEvent unless the batch was drawn in sets of `size` records.

    Sets must come from a partition by record id, fixed before the data were seen. Cut from a batch
    by position, they would all change when one record is taken out, and one record could move the
    sum by 2·C *for each set*. A set of one record cannot be cut in another way, so any sampler
    will do for those.
    """
    scheme = batch.scheme
    if isinstance(scheme, MiniSets) and scheme.set_size == size and batch.groups is not None:
        return
    if size == 1 and batch.groups is None:
        return
    drawn = f"mini-sets of {scheme.set_size}" if isinstance(scheme, MiniSets) else scheme.describe()
    raise UnsupportedEvent(
        f"the query clips mini-sets of {size} records, and the batch was drawn as {drawn}; "
        f"draw it with MiniSetSampler(data, {size}, ...)"
    )


def draws_one_set(batch: Batch) -> bool:
    """Whether every step draws a single set, which is public."""
    return isinstance(batch.scheme, MiniSets) and batch.scheme.chosen == 1


def sets_of(batch: Batch) -> list[Batch]:
    """Each mini-set that takes part, without padding, in the order of the sets' numbers."""
    if batch.mask is not None:
        batch = batch.only(batch.mask).with_mask(None)
    if batch.groups is None:
        places = torch.arange(len(batch), device=batch.indices.device)
        return [batch.only(places[i : i + 1]) for i in range(len(batch))]
    if len(batch) == 0:
        return []
    if draws_one_set(batch):
        return [batch]  # there is nothing to sort
    order = torch.argsort(batch.groups, stable=True)
    _, sizes = torch.unique_consecutive(batch.groups[order], return_counts=True)
    return [batch.only(rows) for rows in order.split(sizes.tolist())]


_TOO_FEW_VALUES = "Expected more than 1 value per channel"


@contextmanager
def ignoring_too_small_sets() -> Iterator[None]:
    """Ignore BatchNorm's refusal of a set of one record; other errors are raised.

    A set may have one record: the last of a partition, or one whose other records are missing. One
    number per channel has no variance, and PyTorch raises. A run whose end depends on one record
    would reveal that record, so such a set's gradient is zero instead, which every bound allows.
    """
    try:
        yield
    except ValueError as error:
        if _TOO_FEW_VALUES not in str(error):
            raise


Parameters = dict[str, nn.Parameter]


class SetGradient(Protocol):
    """g(w; S): maps weights and the records of one mini-set to one tensor per parameter.

    `inputs` and `targets` are tensors or pytrees of them, as in `Records`.
    """

    def __call__(
        self, model: nn.Module, loss: Loss, parameters: Parameters, inputs: Tree, targets: Tree
    ) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class MeanGradient:
    """(1/|S|)·Σ_{ξ ∈ S} ∇f(w; ξ), in one forward and one backward pass of the whole set.

    BatchNorm sees the set, and nothing but the set.
    """

    def __call__(
        self, model: nn.Module, loss: Loss, parameters: Parameters, inputs: Tree, targets: Tree
    ) -> dict[str, Tensor]:
        grads = _of_the_mean(model, loss, list(parameters.values()), inputs, targets)
        return {
            name: torch.zeros_like(p, requires_grad=False) if g is None else g
            for (name, p), g in zip(parameters.items(), grads, strict=True)
        }


@dataclass(frozen=True)
class LocalRun:
    """w − w', where an optimizer that runs over the records of the set moves w to w'.

    `optimizer` makes a new one of a list of tensors, such as
    `partial(torch.optim.SGD, lr=0.1, momentum=0.9)` or `partial(torch.optim.Adam, lr=1e-3)`: its
    state begins and ends with the set. The set's records are read in their order, `at_once` of
    them per step, `epochs` times; a remainder that is too small for BatchNorm is skipped. The
    result is a pseudo-gradient: SGD on it with learning rate 1 moves to the (noisy) mean of the
    sets' w'.
    """

    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    epochs: int = 1
    at_once: int = 1

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.at_once < 1:
            raise ValueError(
                f"epochs is {self.epochs} and at_once is {self.at_once}; give at least 1"
            )

    def __call__(
        self, model: nn.Module, loss: Loss, parameters: Parameters, inputs: Tree, targets: Tree
    ) -> dict[str, Tensor]:
        local = {n: p.detach().clone().requires_grad_() for n, p in parameters.items()}
        tensors = list(local.values())
        stepper = self.optimizer(tensors)
        # The weights depend on the set by now, so even a buffer made from weights alone is private.
        buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        for start in (*range(0, num_rows(inputs), self.at_once),) * self.epochs:
            x, y = take_rows((inputs, targets), slice(start, start + self.at_once))
            with ignoring_too_small_sets(), swapped(model, local | buffers):
                grads = _of_the_mean(model, loss, tensors, x, y)
                for tensor, grad in zip(tensors, grads, strict=True):
                    tensor.grad = grad
                stepper.step()
        return {n: p.detach() - local[n].detach() for n, p in parameters.items()}


def _of_the_mean(
    model: nn.Module, loss: Loss, tensors: list[Tensor], inputs: Tree, targets: Tree
) -> list[Tensor | None]:
    """The gradient of the records' mean loss; None for tensors that it does not depend on."""
    with plain_program(functions=False), torch.enable_grad():
        value = losses_of(loss, call_model(model, inputs), targets).mean()
        if not value.requires_grad:
            return [None] * len(tensors)
        grads = torch.autograd.grad(value, tensors, allow_unused=True)
    return [None if grad is None else grad.to_dense() for grad in grads]


class SetEngine(Protocol):
    """Σ_j [g(w; S_j)]_C over some mini-sets, and the norms of g for public ones."""

    def clipped_sums(
        self, task: ClipTask, gradient: SetGradient, sets: Sequence[Batch]
    ) -> Clipped: ...

    def block_norms(
        self, task: ClipTask, gradient: SetGradient, sets: Sequence[Batch]
    ) -> list[Tensor]: ...


class SetBySet:
    """Each mini-set in a pass of its own, with any g and any module.

    On a GPU the pass of a set's mean gradient is recorded once per shape (`Recorder`).
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()

    def clipped_sums(self, task: ClipTask, gradient: SetGradient, sets: Sequence[Batch]) -> Clipped:
        def work(
            task: ClipTask, inputs: Tree, targets: Tree, mask: Tensor | None = None
        ) -> Clipped:
            return clipped_vector(task, vector_of(task, gradient, inputs, targets))

        def clipped(one: Batch) -> Clipped:
            if not one.indices.is_cuda or not isinstance(gradient, MeanGradient):
                return work(task, one.inputs, one.targets)
            return run_recorded(self.recorder, task, one.inputs, one.targets, None, work)

        if len(sets) == 1:
            return clipped(sets[0])
        return added_up(from_one_start(map(clipped, sets), task.model))

    def block_norms(
        self, task: ClipTask, gradient: SetGradient, sets: Sequence[Batch]
    ) -> list[Tensor]:
        device = sets[0].indices.device
        vectors = (vector_of(task, gradient, one.inputs, one.targets) for one in sets)
        norms = [norms_of_blocks(task, as_one_record(task, v), 1, device) for v in vectors]
        return [torch.cat(of_block) for of_block in zip(*norms, strict=True)]

    def forget(self) -> None:
        self.recorder.forget()


def vector_of(
    task: ClipTask, gradient: SetGradient, inputs: Tree, targets: Tree
) -> dict[str, Tensor]:
    """g of one set; zero where BatchNorm refuses so few records."""
    loss: Any = task.loss
    with ignoring_too_small_sets():
        return gradient(task.model, loss, task.parameters, inputs, targets)
    return {n: torch.zeros_like(p, requires_grad=False) for n, p in task.parameters.items()}


def clipped_vector(task: ClipTask, vector: dict[str, Tensor]) -> Clipped:
    """[g]_C of one set; nothing at all where its squared norm is not finite."""
    return clip_and_sum(task, as_one_record(task, vector), 1, device_of(vector), None)


def as_one_record(task: ClipTask, vector: dict[str, Tensor]) -> dict[str, RecordGradients]:
    """A set's vector as the gradients of one record, with zeros in the entries not active."""

    def row(name: str, tensor: Tensor) -> _Row:
        row, mask = wide(tensor.detach()).unsqueeze(0), task.active.get(name)
        return _Row(row if mask is None else torch.where(mask, row, 0.0))

    return {name: row(name, tensor) for name, tensor in vector.items()}


class _Row(Stacked):
    """One record's gradients, scaled by a multiplication, which is faster than a matrix product."""

    def total(self, scale: RowScale) -> Tensor:
        return scale.of(self.rows_BP)[0]


class SetsAsRecords:
    """Per-sample clipping's engine on sets whose records do not meet inside the model.

    The mean gradient of a set of s records is that of one record with s views, so book-keeping
    gives all sets in one forward and one backward pass, and proves for each shape that runs that
    sets stay apart: its plan has sets in the place of records. At s = 1 it is per-sample clipping.
    All sets are computed like this, even if a size occurs once: book-keeping clips by upper bounds
    of norms, so a set whose method depended on another set's records would depend on them too.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or Automatic()

    def clipped_sums(self, task: ClipTask, gradient: SetGradient, sets: Sequence[Batch]) -> Clipped:
        pieces = self._by_size(task, gradient, sets)
        return added_up(self.engine.clipped_sums(of_size, piece) for of_size, piece in pieces)

    def block_norms(
        self, task: ClipTask, gradient: SetGradient, sets: Sequence[Batch]
    ) -> list[Tensor]:
        pieces = self._by_size(task, gradient, sets)
        norms = [self.engine.block_norms(of_size, piece) for of_size, piece in pieces]
        return [torch.cat(of_block) for of_block in zip(*norms, strict=True)]

    @staticmethod
    def _by_size(
        task: ClipTask, gradient: SetGradient, sets: Sequence[Batch]
    ) -> Iterator[tuple[ClipTask, Batch]]:
        """Sets of one size as one batch, a set's records in consecutive rows."""
        if not isinstance(gradient, MeanGradient):
            raise UnsupportedModule(
                f"SetsAsRecords computes mean gradients, and was given {type(gradient).__name__}; "
                "use SetBySet()"
            )
        by_size: dict[int, list[Batch]] = {}
        for one in sets:
            by_size.setdefault(len(one), []).append(one)
        for size, same_size in by_size.items():
            rows = [(one.inputs, one.targets) for one in same_size]
            inputs, targets = map_tensors(lambda *tensors: torch.cat(tensors), *rows)
            first = same_size[0]
            joined = batch_of(inputs, targets, divisor=first.divisor, scheme=first.scheme)
            yield replace(task, views=size), joined

    def forget(self) -> None:
        getattr(self.engine, "forget", lambda: None)()


def added_up(clipped: Iterable[Clipped]) -> Clipped:
    """Sums and counts of all parts, as new tensors: the next replay overwrites a recording's.

    In float64 where the device has it, as parts may be thousands of sets.
    """
    sums: dict[str, Tensor] = {}
    counts: tuple[Tensor, ...] = ()
    for part in clipped:
        for name, value in part.sums.items():
            if name not in sums:
                sums[name] = torch.zeros_like(value, dtype=sum_dtype(value.device))
            sums[name] += value
        before = counts or tuple(torch.zeros_like(count) for count in part.counts)
        counts = tuple(a + b for a, b in zip(before, part.counts, strict=True))
    return Clipped(sums, counts)
