"""Batches of a fixed size: drawn anew for each step, or cut from shuffled epochs.

Both are analysed for replace-one: neighbours then have the same number of records, so it may be
read, and nobody else's place changes.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Unpack

import dp_accounting as dpa
import numpy as np

from tacit.budget import Relation
from tacit.errors import argument
from tacit.randomness import Stream
from tacit.records import as_records
from tacit.sampling.sampler import Sampler, SamplerOptions
from tacit.sampling.scheme import (
    Scheme,
    Unit,
    register_scheme,
    require_records,
    require_replace_one,
    set_whole_numbers,
)


@register_scheme
@dataclass(frozen=True)
class WithoutReplacement(Scheme):
    """Each step takes `sample_size` of `population` records, all subsets equally likely."""

    population: int
    sample_size: int

    def __post_init__(self) -> None:
        set_whole_numbers(self, "sample_size")
        if self.sample_size > self.population:
            raise ValueError(
                f"{argument('sample_size', '--batch-size')} is {self.sample_size}, and there are "
                f"{self.population} records; give at most as many"
            )
        set_whole_numbers(self, "population")

    def step_event(self, noise_multiplier: float, unit: Unit = Unit.RECORD) -> dpa.DpEvent:
        require_records(self, unit)
        gaussian = dpa.GaussianDpEvent(noise_multiplier)
        return dpa.SampledWithoutReplacementDpEvent(self.population, self.sample_size, gaussian)

    def epochs(self, steps: int) -> float:
        return steps * self.sample_size / self.population

    def amplifies(self) -> bool:
        return self.sample_size < self.population

    def require(self, relation: Relation) -> None:
        why = "adding a record changes who else is drawn"
        require_replace_one(relation, "batches of a fixed size", why)

    def describe(self) -> str:
        return f"fixed size, {self.sample_size} of {self.population} without replacement"


class FixedSizeSampler(Sampler):
    """Each step takes `batch_size` records, uniformly without replacement; replace-one only.

    Other arguments: see `Sampler`.

    Example:
        >>> sampler = tacit.FixedSizeSampler(train, batch_size=256, steps=1000)
    """

    scheme: WithoutReplacement

    def __init__(
        self, data: object, batch_size: int, steps: int = 1, **options: Unpack[SamplerOptions]
    ) -> None:
        records = as_records(data)
        scheme = WithoutReplacement(len(records), batch_size)
        super().__init__(
            records, scheme=scheme, steps=steps, expected_batch_size=batch_size, **options
        )

    def draw(self, stream: Stream) -> tuple[np.ndarray, None]:
        return stream.subset(self.scheme.population, self.scheme.sample_size), None


@register_scheme
@dataclass(frozen=True)
class ShuffledEpochs(Scheme):
    """Every record once per epoch, in a shuffled order: accounted WITHOUT amplification.

    Given the order, a replaced record touches one batch of each epoch that has begun, so
    E epochs are E Gaussian mechanisms, and averaging over orders cannot hurt (joint convexity).
    A shuffled epoch is not a Poisson sample and gets no Poisson ε. An epoch belongs to one
    shuffle: a sampler that starts again starts another epoch, which is charged again.
    """

    steps_per_epoch: int

    def __post_init__(self) -> None:
        set_whole_numbers(self, "steps_per_epoch")

    def step_event(self, noise_multiplier: float, unit: Unit = Unit.RECORD) -> dpa.DpEvent:
        require_records(self, unit)
        return dpa.GaussianDpEvent(noise_multiplier)

    def num_events(self, steps: int) -> int:
        return math.ceil(steps / self.steps_per_epoch)

    def steps_within(self, events: int) -> int:
        return events * self.steps_per_epoch

    def epochs(self, steps: int) -> float:
        return steps / self.steps_per_epoch

    def amplifies(self) -> bool:
        return False

    def require(self, relation: Relation) -> None:
        why = "adding a record moves the others between batches"
        require_replace_one(relation, "shuffled epochs", why)

    def describe(self) -> str:
        return (
            f"shuffled epochs of {self.steps_per_epoch} steps, accounted without "
            "amplification by sampling"
        )


class ShuffleSampler(Sampler):
    """Every record once per epoch, in a new random order; for comparison, replace-one only.

    ε is accounted without amplification, and reports say so. The last batch of an epoch may be
    smaller; it is divided by the declared batch size like every other. Other arguments: see
    `Sampler`.

    Example:
        >>> sampler = tacit.ShuffleSampler(train, batch_size=256, steps=1000)
    """

    scheme: ShuffledEpochs

    def __init__(
        self, data: object, batch_size: int, steps: int = 1, **options: Unpack[SamplerOptions]
    ) -> None:
        records = as_records(data)
        self._batch_size = WithoutReplacement(len(records), batch_size).sample_size
        super().__init__(
            records,
            scheme=ShuffledEpochs(math.ceil(len(records) / self._batch_size)),
            steps=steps,
            expected_batch_size=batch_size,
            **options,
        )

    def reset(self) -> None:
        self._order = np.empty(0, dtype=np.int64)
        # Epochs of different shuffles have different keys, even if they have the same number.
        self._shuffle, self._epoch = secrets.token_hex(8), 0

    def current_epoch(self) -> Hashable:
        return self._shuffle, self._epoch

    def draw(self, stream: Stream) -> tuple[np.ndarray, None]:
        if len(self._order) == 0:
            # Count first: if this is interrupted, the next order is never part of the last epoch.
            self._epoch += 1
            self._order = stream.permutation(len(self.records))
        rows, self._order = np.split(self._order, [self._batch_size])
        return rows, None
