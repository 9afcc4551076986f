"""What all samplers share: steps of batches, in physical pieces, padded where asked.

What all samplers share: steps of batches, in physical pieces, padded where asked.
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Hashable, Iterator

import numpy as np
import torch
from torch import Tensor

from tacit.randomness import ProcessLock, Randomness, Stream
from tacit.records import as_records
from tacit.sampling.batch import Batch, Draw
from tacit.sampling.scheme import Scheme, whole_number

_one_at_a_time = ProcessLock()


class Sampler(abc.ABC):
    """Iterates over `steps` batches. The data stays on the device where it is.

    `max_physical_batch` bounds how many records are gathered at once. With `padded`, every
    physical batch has exactly that many rows (`capacity`), the surplus masked out: one static
    shape. With `pad_to=k` the number of rows is rounded up to a multiple of k: a few shapes and
    little waste, which spares a GPU the choice of new kernels at every step. A draw that exceeds
    one physical batch goes on in the next; nobody is ever dropped, because dropping somebody
    would depend on the others.
    """

    def __init__(
        self,
        data: object,
        *,
        scheme: Scheme,
        steps: int,
        expected_batch_size: float,
        max_physical_batch: int | None,
        padded: bool,
        pad_to: int | None,
        seed: int | None,
    ) -> None:
        steps = whole_number("steps", steps, least=0)
        if not (math.isfinite(expected_batch_size) and expected_batch_size > 0):
            raise ValueError(f"expected_batch_size is {expected_batch_size}; give a number above 0")
        if max_physical_batch is not None and max_physical_batch < 1:
            raise ValueError(f"max_physical_batch is {max_physical_batch}; give at least 1")
        if pad_to is not None and pad_to < 1:
            raise ValueError(f"pad_to is {pad_to}; give at least 1")
        if padded and pad_to is not None:
            raise ValueError("padded asks for one shape and pad_to for several; give one of them")
        self.records = as_records(data)
        self.scheme = scheme
        self.steps = steps
        self.expected_batch_size = float(expected_batch_size)
        self.padded = padded
        self.pad_to = pad_to
        self.max_physical_batch = max_physical_batch
        self._pid = os.getpid()
        self._start(seed)

    def _start(self, seed: int | None, *context: str | int) -> None:
        self.seed = seed
        self._randomness = Randomness(seed)
        self._context = context
        self._passes, self._steps_drawn = 0, 0

    @property
    def capacity(self) -> int:
        """Rows of a padded physical batch: from public constants only."""
        if self.max_physical_batch is not None:
            return self.max_physical_batch
        # Five deviations above a Poisson batch's mean: a second piece is rare, and harmless.
        return math.ceil(self.expected_batch_size + 5 * math.sqrt(self.expected_batch_size))

    @abc.abstractmethod
    def draw(self, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows of the dataset that take part in the next step, and the mini-set of each.

        `stream` belongs to this step alone; whatever is random must come from it.
        """

    def current_epoch(self) -> Hashable | None:
        """The shuffled epoch that the batch just drawn is a part of; None where there is none."""
        return None

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        with _one_at_a_time:
            self._passes, self._steps_drawn = self._passes + 1, 0
        for _ in range(self.steps):
            yield self.next_batch()

    def next_batch(self) -> Batch:
        """One more step's batch. An empty one is a step like any other."""
        if os.getpid() != self._pid:
            self._after_fork()
        with _one_at_a_time:
            context = (*self._context, self._passes)
            step, self._steps_drawn = self._steps_drawn, self._steps_drawn + 1
            stream = self._randomness.stream("sampling", *context, step)
            rows, sets = self.draw(stream)
            epoch = self.current_epoch()
        mask = None
        if self.padded or self.pad_to is not None:
            rows, sets, kept = self._pad(rows, sets, self.pad_to or self.capacity)
            mask = to_device(kept, self.device).bool()
        groups = None if sets is None else to_device(sets, self.device)
        return Batch(
            records=self.records,
            indices=to_device(rows, self.device),
            divisor=self.expected_batch_size,
            scheme=self.scheme,
            mask=mask,
            groups=groups,
            max_physical=self.capacity if self.padded else self.max_physical_batch,
            epoch=epoch,
            drawn=Draw(self._randomness.fingerprint("sampling", *context), step),
        )

    def _pad(
        self, rows: np.ndarray, sets: np.ndarray | None, multiple: int
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        size = multiple * max(1, math.ceil(len(rows) / multiple))
        padding = (0, size - len(rows))
        kept = np.pad(np.ones(len(rows), dtype=np.int64), padding)
        padded_sets = None if sets is None else np.pad(sets, padding, constant_values=-1)
        return np.pad(rows, padding), padded_sets, kept

    def _after_fork(self) -> None:
        """A fork that repeated its parent's draws would not be an independent sample."""
        if self.seed is not None:
            raise RuntimeError(
                "a seeded sampler was carried into a forked process, where it would repeat its "
                "parent's batches; make a new one there with a seed of its own"
            )
        self._start(None)
        self._pid = os.getpid()
        self.forget()

    def __getstate__(self) -> dict[str, object]:
        """A copy that repeated these draws would not be an independent sample either."""
        if self.seed is not None:
            raise TypeError(
                "a copy of a seeded sampler would repeat its batches; make a new one with a seed "
                "of its own"
            )
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._start(None)
        self._pid = os.getpid()
        self.forget()

    def forget(self) -> None:  # noqa: B027 (most samplers have nothing to forget)
        """Drop what was drawn ahead of its step; a sampler that draws ahead says how."""

    def reseed(self, seed: int, *context: str | int) -> None:
        """Draw from this seed from now on; each context has draws of its own."""
        self._start(seed, *context)
        self.forget()

    @property
    def device(self) -> torch.device:
        return self.records.device

    def to(self, device: torch.device | str) -> None:
        """Move the data to `device` once; batches are gathered there from then on."""
        self.records = self.records.to(device)


def to_device(indices: np.ndarray, device: torch.device) -> Tensor:
    """Indices as a tensor on `device`, without waiting for the work queued there."""
    tensor = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
