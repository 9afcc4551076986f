"""Samplers and the batches that they hand to a query: the records of one step.

A batch gathers its records when they are read. `Sampler` is the base of all samplers: it turns
drawn rows into batches, padded where asked. Where records are read from disk, it draws the rows of
the next steps ahead, so that they can be read while a step runs.
"""

from __future__ import annotations

import abc
import hashlib
import math
import os
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor

from tacit.columns import LazyColumn, columns_of
from tacit.prefetch import HeldRows, Rows, read_ahead
from tacit.pytrees import Tree, map_tensors, take_rows, tensors_of
from tacit.randomness import ProcessLock, Randomness, Stream
from tacit.ranks import Ranks, share_of
from tacit.records import Records, as_records
from tacit.sampling.scheme import Scheme, require_batch_size, whole_number

T = TypeVar("T")
_COMPARED_ROWS, _COMPARED_LAZY = 256, 16
_lock = ProcessLock()  # several threads may draw from one sampler


@dataclass(eq=False)
class Draw:
    """One draw of a sampler, and whether its gradient has been released.

    The accountant treats steps as independent draws. Two releases of one draw contain the same
    records, so amplification by sampling does not hold for the second. `sampling` names the seeded
    stream of the draw (None without a seed), and `step` is its place in that stream. Of a draw that
    several ranks share, each has some of the rows.
    """

    sampling: str | None = None
    step: int | None = None
    ranks: int = 1  # that share it
    released: bool = False
    pid: int = field(default_factory=os.getpid)

    def __deepcopy__(self, memo: object) -> Draw:
        return self  # a copied batch is still the same draw

    def __reduce__(self) -> str:
        raise TypeError(
            "a drawn batch cannot be pickled: its copy could be released a second time; draw "
            "batches in the process that releases them"
        )


@dataclass(frozen=True)
class Batch:
    """The records of one step.

    Args:
        records: The dataset.
        indices: Rows of the dataset that take part.
        divisor: The declared expected batch size. The sum of gradients is divided by it, never by
            `len(batch)`, which is private.
        scheme: How the records were sampled, for the accountant.
        mask: False on rows that are padding.
        groups: The mini-set of each row, where records are drawn in sets.
        max_physical: The most rows to gather at once. The result does not depend on it.
        epoch: The key of the shuffled epoch that this batch belongs to. A record takes part once
            per epoch, and all batches of one epoch are charged as one event.
        drawn: The sampler's draw. Its gradient is released once.
        held: The rows that were read from disk, where the records are read when they are needed.
    """

    records: Records
    indices: Tensor
    divisor: float
    scheme: Scheme
    mask: Tensor | None = None
    groups: Tensor | None = None
    max_physical: int | None = None
    epoch: Hashable | None = None
    drawn: Draw | None = None
    held: HeldRows | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        columns = columns_of((self.records.inputs, self.records.targets))
        if self.held is None and columns:
            object.__setattr__(self, "held", HeldRows(columns))

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        # Without the number of rows, which is private.
        return f"Batch({self.records.name!r}, divisor={self.divisor:g}, scheme={self.scheme!r})"

    @property
    def inputs(self) -> Tree:
        """The inputs of these records, in the structure of `records.inputs`."""
        return self._gather(self.records.inputs)

    @property
    def targets(self) -> Tree:
        """The targets of these records, in the structure of `records.targets`."""
        return self._gather(self.records.targets)

    @property
    def record_ids(self) -> Tensor:
        return self._gather(self.records.record_ids)

    def only(self, rows: Tensor | slice) -> Batch:
        """These rows of the batch, given as a mask, as indices or as a slice."""
        return replace(
            self,
            indices=self.indices[rows],
            mask=None if self.mask is None else self.mask[rows],
            groups=None if self.groups is None else self.groups[rows],
        )

    def with_mask(self, mask: Tensor | None) -> Batch:
        return replace(self, mask=mask)

    def first(self, count: int) -> Batch:
        """The first `count` rows, all of them counted as records."""
        return self.only(slice(count)).with_mask(None)

    def at_most(self, rows: int, views: int = 1) -> Batch:
        """Limit physical batches to `rows` records if the batch has more, `views` per record."""
        if len(self) * views <= rows:
            return self
        return replace(self, max_physical=min(self.max_physical or rows, rows))

    def physical(self) -> Iterator[Batch]:
        """The same rows in pieces of at most `max_physical`; an empty batch has no pieces."""
        size = self.max_physical or max(len(self), 1)
        for start in range(0, len(self), size):
            yield self.only(slice(start, start + size))

    def _gather(self, columns: T) -> T:
        if len(self.records.record_ids) == 0:  # padding of an empty dataset
            return map_tensors(lambda t: t.new_zeros((len(self), *t.shape[1:])), columns)
        if self.held is not None:
            return self.held.gather(columns, self.indices)
        return take_rows(columns, self.indices)


def batch_of(
    inputs: Tree,
    targets: Tree,
    *,
    divisor: float,
    scheme: Scheme,
    max_physical: int | None = None,
) -> Batch:
    """A batch from tensors or pytrees of them, for users who sample on their own.

    The ledger charges what `scheme` says. Every release must then have a draw of its own, which
    Tacit cannot check.
    """
    records = Records(inputs, targets)
    indices = torch.arange(len(records), device=records.device)
    return Batch(records, indices, divisor, scheme, max_physical=max_physical)


def _steps(scheme: Scheme, steps: int, epochs: float | None) -> int:
    """The number of steps, given or by the epochs that the scheme's constants make of one."""
    if epochs is None:
        return whole_number("steps", steps, least=0)
    if steps != 1:
        raise ValueError("both steps and epochs are given; leave one of them out")
    if not isinstance(epochs, int | float) or not 0 < epochs < math.inf:
        raise ValueError(f"epochs is {epochs!r}; give a number above 0")
    return max(1, round(epochs / scheme.epochs(1)))


class SamplerOptions(TypedDict, total=False):
    """The keyword arguments that every sampler takes; `Sampler` describes them."""

    max_physical_batch: int | None
    padded: bool | None
    pad_to: int | None
    seed: int | None
    epochs: float | None


@dataclass(frozen=True)
class _Drawn:
    """The rows of one step, and what the sampler was after it drew them."""

    step: int
    rows: np.ndarray
    sets: np.ndarray | None
    most: int  # rows of any rank
    epoch: Hashable | None
    changed: dict[str, Any]


class Sampler(abc.ABC):
    """Iterates over `steps` batches. The data stays on its device, or on disk.

    To write a sampler, derive from this class, implement `draw`, and give a scheme whose event
    dominates it. What `draw` keeps from one step to the next it must assign to attributes anew:
    the steps to come are drawn ahead on a shallow copy, and count as drawn when they are handed
    out. A batch that was read ahead and is never handed out is no draw.

    Args:
        data: Records, or what `Records` is made from.
        scheme: The sampling scheme that is charged.
        steps: The number of batches per iteration.
        epochs: Instead of `steps`, how often each record is expected to take part, by the scheme's
            own declared constants: steps = epochs / rate, rounded, at least 1.
        expected_batch_size: The declared divisor of every batch.
        max_physical_batch: The most records to gather at once. A larger draw continues in the next
            physical batch. No record is dropped, because that would depend on the other records.
        padded: Pad every physical batch to `capacity` rows and mask the padding: one static shape.
            By default a `PoissonSampler` does so on a GPU, with less room: there a kernel for
            another number of rows may round a record's gradient in another way, so that a record
            that makes a batch larger could change what the others contribute.
        pad_to: Pad to a multiple of this number instead: a few shapes with little waste, which
            spares a GPU the choice of new kernels at every step.
        seed: None draws from the operating system. Anyone who knows a seed can repeat the draws.
    """

    def __init__(
        self,
        data: object,
        *,
        scheme: Scheme,
        steps: int = 1,
        expected_batch_size: float,
        max_physical_batch: int | None = None,
        padded: bool | None = None,
        pad_to: int | None = None,
        seed: int | None = None,
        epochs: float | None = None,
    ) -> None:
        require_batch_size(expected_batch_size)
        for name, value in (("max_physical_batch", max_physical_batch), ("pad_to", pad_to)):
            if value is not None:
                whole_number(name, value, least=1)
        if padded and pad_to is not None:
            raise ValueError("padded asks for one shape and pad_to for several; give one of them")
        self.records = as_records(data)
        self.scheme = scheme
        self.steps = _steps(scheme, steps, epochs)
        self.expected_batch_size = float(expected_batch_size)
        self.max_physical_batch = max_physical_batch
        self.padded, self.pad_to = padded, pad_to
        self._ranks: Ranks | None = None
        self._ids: np.ndarray | None = None  # of all rows, where ranks share them
        self.reseed(seed)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.scheme!r}, steps={self.steps}, "
            f"expected_batch_size={self.expected_batch_size:g})"
        )

    @abc.abstractmethod
    def draw(self, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows of the dataset that take part in the next step, and the mini-set of each.

        `stream` belongs to this step alone; every random choice must come from it.
        """

    def current_epoch(self) -> Hashable | None:
        """The key of the shuffled epoch that the last draw belongs to, or None."""
        return None

    def reset(self) -> None:  # noqa: B027 (most samplers draw nothing in advance)
        """Drop what was drawn in advance. Called when the sampler gets new randomness."""

    def reseed(self, seed: int | None, *context: str | int) -> None:
        """Draw from this seed from now on. Each context has draws of its own."""
        self.seed = seed
        self._randomness = Randomness(seed)
        if self._ranks is not None:
            self._randomness.share(self._ranks)
        self._context = context
        self._passes, self._steps_drawn = 0, 0
        self._ahead: deque[_Drawn] = deque()
        self._scout: Sampler | None = None  # draws ahead
        self._pid = os.getpid()
        self.reset()

    def share(self, ranks: Ranks) -> None:
        """Draw each step together with these ranks: all the same rows, and each takes its share.

        Shares are padded to one number of physical batches on all ranks, whatever was drawn.
        """
        self._ranks, self._ids = ranks, self.records.record_ids.cpu().numpy()
        self.padded, self.pad_to = True, None
        self.reseed(self.seed, *self._context)
        ranks.require_same(self._what_is_drawn(), "their records or samplers")

    def _what_is_drawn(self) -> list[object]:
        """What all ranks must agree on, with some of the records in full.

        A rank with other records, or with the same ones under other ids, could sum a record that
        another rank sums too. The rows that are compared are secret and the same on all ranks.
        """
        ids = self.records.record_ids
        facts: list[object] = [repr(self.scheme), self.steps, self.expected_batch_size, self.seed]
        facts += [self.max_physical_batch, len(ids), self._digest(ids)]
        if len(ids):
            words = self._randomness.stream("compared rows").words(_COMPARED_ROWS, np.uint64)
            rows = torch.from_numpy((words % np.uint64(len(ids))).astype(np.int64))
            rows = rows[:_COMPARED_LAZY] if self._columns() else rows
            some = self.records.take(rows.to(self.device)).read()
            facts += [self._digest(t) for t in tensors_of((some.inputs, some.targets))]
        return facts

    @staticmethod
    def _digest(values: Tensor) -> tuple[object, ...]:
        content = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return values.dtype, tuple(values.shape), hashlib.blake2b(content).hexdigest()

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that share its draws."""
        return self._ranks

    @property
    def _num_ranks(self) -> int:
        return 1 if self._ranks is None else self._ranks.count

    @property
    def capacity(self) -> int:
        """Rows of a padded physical batch. It depends on public constants only."""
        if self.max_physical_batch is not None:
            return self.max_physical_batch
        # A second piece is harmless. It is rare where it was asked that the size cannot be seen.
        expected = self.expected_batch_size / self._num_ranks
        return math.ceil(expected + (5 if self.padded else 2) * math.sqrt(expected))

    @property
    def _has_one_shape(self) -> bool:
        """Whether every physical batch has `capacity` rows."""
        return bool(self.padded)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        with _lock:
            self._passes, self._steps_drawn = self._passes + 1, 0
            self._ahead.clear()
        columns = self._columns()
        steps = self.steps
        fetched = read_ahead(columns, self._rows_ahead(steps)) if columns else None
        if fetched is None:
            for _ in range(steps):
                yield self.next_batch()
            return
        with closing(fetched):
            for rows_and_values in fetched:
                batch = self.next_batch()
                assert batch.held is not None
                batch.held.fill(*rows_and_values)
                yield batch

    def _columns(self) -> list[LazyColumn]:
        return columns_of((self.records.inputs, self.records.targets))

    def _rows_ahead(self, steps: int) -> Iterator[Rows]:
        """The rows to read for the steps to come, each step drawn when it is asked for."""
        for _ in range(steps):
            with _lock:
                if not self._ahead or self._scout is None:
                    self._scout = object.__new__(type(self))
                    vars(self._scout).update(vars(self), _scout=None)
                drawn = self._scout._drawn_at(self._steps_drawn + len(self._ahead))
                self._ahead.append(drawn)
            # The first record too: it fills the rows of padding.
            rows = np.union1d(drawn.rows, [0] if len(self.records.record_ids) else [])
            yield torch.from_numpy(rows.astype(np.int64)), self._item_key(drawn.step)

    def _item_key(self, step: int) -> bytes:
        """Of the draws that a dataset's items make by themselves in this step."""
        return self._randomness.stream("items", *self._context, self._passes, step).key

    def _drawn_at(self, step: int) -> _Drawn:
        before = dict(vars(self))
        rows, sets = self.draw(
            self._randomness.stream("sampling", *self._context, self._passes, step)
        )
        changed = {name: v for name, v in vars(self).items() if before.get(name, self) is not v}
        most = len(rows)
        if self._ranks is not None:
            assert self._ids is not None
            ranks = self._ranks
            rows, sets, most = share_of(rows, sets, self._ids, ranks.rank, ranks.count)
        return _Drawn(step, rows, sets, most, self.current_epoch(), changed)

    def next_batch(self) -> Batch:
        """The batch of one more step. An empty batch is a step like any other."""
        if os.getpid() != self._pid:  # a fork must not repeat its parent's draws
            if self._ranks is not None:
                raise RuntimeError(
                    "a sampler that shares its draws with other ranks was carried into a forked "
                    "process; start ranks as processes of their own, as torchrun does"
                )
            if self.seed is not None:
                raise RuntimeError(
                    "a seeded sampler was carried into a forked process, where it would repeat its "
                    "parent's batches; make a new one there with a seed of its own"
                )
            self.reseed(None)
        with _lock:
            context = (*self._context, self._passes)
            step, self._steps_drawn = self._steps_drawn, self._steps_drawn + 1
            if not (self._ahead and self._ahead[0].step == step):
                self._ahead.clear()
                self._ahead.append(self._drawn_at(step))
            drawn = self._ahead.popleft()
            vars(self).update(drawn.changed)
            columns = self._columns()
            held = HeldRows(columns, self._item_key(step)) if columns else None
        rows, sets, mask = drawn.rows, drawn.sets, None
        has_one_shape = self._has_one_shape
        if has_one_shape or self.pad_to is not None:
            multiple = self.pad_to or self.capacity
            padding = (0, multiple * max(1, math.ceil(drawn.most / multiple)) - len(rows))
            mask = self._on_device(np.pad(np.ones(len(rows), dtype=np.int64), padding)).bool()
            sets = None if sets is None else np.pad(sets, padding, constant_values=-1)
            rows = np.pad(rows, padding)
        return Batch(
            records=self.records,
            indices=self._on_device(rows),
            divisor=self.expected_batch_size,
            scheme=self.scheme,
            mask=mask,
            groups=None if sets is None else self._on_device(sets),
            max_physical=self.capacity if has_one_shape else self.max_physical_batch,
            epoch=drawn.epoch,
            held=held,
            drawn=Draw(self._randomness.fingerprint("sampling", *context), step, self._num_ranks),
        )

    def __getstate__(self) -> dict[str, object]:
        if self.seed is not None:
            raise TypeError(
                "a copy of a seeded sampler would repeat its batches; make a new one with a seed "
                "of its own"
            )
        return {**vars(self), "_ahead": None, "_scout": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.reseed(None)  # a copy that repeated these draws would not be an independent sample

    @property
    def device(self) -> torch.device:
        return self.records.device

    def to(self, device: torch.device | str, floating: torch.dtype | None = None) -> None:
        """Move the data to `device` once, and real numbers to the type `floating` if it is given.

        Batches are gathered there from then on.
        """
        self.records = self.records.to(device, floating)

    def _on_device(self, indices: np.ndarray) -> Tensor:
        """Indices as a tensor, without waiting for the work queued on the device."""
        tensor = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)
