"""The base of all samplers: it turns drawn rows into batches, padded where asked."""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Hashable, Iterator
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from tacit.randomness import ProcessLock, Randomness, Stream
from tacit.records import as_records
from tacit.sampling.batch import Batch, Draw
from tacit.sampling.scheme import Scheme, whole_number

_lock = ProcessLock()


class SamplerOptions(TypedDict, total=False):
    """The keyword arguments that every sampler takes; `Sampler` describes them."""

    max_physical_batch: int | None
    padded: bool
    pad_to: int | None
    seed: int | None


class Sampler(abc.ABC):
    """Iterates over `steps` batches. The data stays on its device.

    To write a sampler, derive from this class, implement `draw`, and give a scheme whose event
    dominates it.

    Args:
        data: Records, or what `Records` is made from.
        scheme: The sampling scheme that is charged.
        steps: The number of batches per iteration.
        expected_batch_size: The declared divisor of every batch.
        max_physical_batch: The most records to gather at once. A larger draw continues in the next
            physical batch. No record is dropped, because that would depend on the other records.
        padded: Pad every physical batch to `capacity` rows and mask the padding: one static shape.
        pad_to: Pad to a multiple of this number instead: a few shapes with little waste, which
            spares a GPU the choice of new kernels at every step.
        seed: None draws from the operating system. Anyone who knows a seed can repeat the draws.
    """

    def __init__(
        self,
        data: object,
        *,
        scheme: Scheme,
        steps: int,
        expected_batch_size: float,
        max_physical_batch: int | None = None,
        padded: bool = False,
        pad_to: int | None = None,
        seed: int | None = None,
    ) -> None:
        if not (math.isfinite(expected_batch_size) and expected_batch_size > 0):
            raise ValueError(f"expected_batch_size is {expected_batch_size}; give a number above 0")
        for name, value in (("max_physical_batch", max_physical_batch), ("pad_to", pad_to)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        if padded and pad_to is not None:
            raise ValueError("padded asks for one shape and pad_to for several; give one of them")
        self.records = as_records(data)
        self.scheme = scheme
        self.steps = whole_number("steps", steps, least=0)
        self.expected_batch_size = float(expected_batch_size)
        self.max_physical_batch = max_physical_batch
        self.padded, self.pad_to = padded, pad_to
        self._start(seed)

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

    def reseed(self, seed: int, *context: str | int) -> None:
        """Draw from this seed from now on. Each context has draws of its own."""
        self._start(seed, *context)

    def _start(self, seed: int | None, *context: str | int) -> None:
        self.seed = seed
        self._randomness = Randomness(seed)
        self._context = context
        self._passes, self._steps_drawn = 0, 0
        self._pid = os.getpid()
        self.reset()

    @property
    def capacity(self) -> int:
        """Rows of a padded physical batch. It depends on public constants only."""
        if self.max_physical_batch is not None:
            return self.max_physical_batch
        # Five deviations above a Poisson batch's mean: a second piece is rare, and harmless.
        return math.ceil(self.expected_batch_size + 5 * math.sqrt(self.expected_batch_size))

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        with _lock:
            self._passes, self._steps_drawn = self._passes + 1, 0
        for _ in range(self.steps):
            yield self.next_batch()

    def next_batch(self) -> Batch:
        """The batch of one more step. An empty batch is a step like any other."""
        if os.getpid() != self._pid:  # a fork must not repeat its parent's draws
            if self.seed is not None:
                raise RuntimeError(
                    "a seeded sampler was carried into a forked process, where it would repeat its "
                    "parent's batches; make a new one there with a seed of its own"
                )
            self._start(None)
        with _lock:
            context = (*self._context, self._passes)
            step, self._steps_drawn = self._steps_drawn, self._steps_drawn + 1
            rows, sets = self.draw(self._randomness.stream("sampling", *context, step))
            epoch = self.current_epoch()
        mask = None
        if self.padded or self.pad_to is not None:
            multiple = self.pad_to or self.capacity
            padding = (0, multiple * max(1, math.ceil(len(rows) / multiple)) - len(rows))
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
            max_physical=self.capacity if self.padded else self.max_physical_batch,
            epoch=epoch,
            drawn=Draw(self._randomness.fingerprint("sampling", *context), step),
        )

    def __getstate__(self) -> dict[str, object]:
        if self.seed is not None:
            raise TypeError(
                "a copy of a seeded sampler would repeat its batches; make a new one with a seed "
                "of its own"
            )
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._start(None)  # a copy that repeated these draws would not be an independent sample

    @property
    def device(self) -> torch.device:
        return self.records.device

    def to(self, device: torch.device | str) -> None:
        """Move the data to `device` once; batches are gathered there from then on."""
        self.records = self.records.to(device)

    def _on_device(self, indices: np.ndarray) -> Tensor:
        """Indices as a tensor, without waiting for the work queued on the device."""
        tensor = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)
