"""Shuffled epochs: what most training code does, and what it really buys.

Shuffled epochs: what most training code does, and what it really buys.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Hashable
from dataclasses import dataclass

import dp_accounting as dpa
import numpy as np

from tacit.budget import Relation
from tacit.errors import UnsupportedEvent
from tacit.randomness import Stream
from tacit.records import as_records
from tacit.sampling.sampler import Sampler
from tacit.sampling.scheme import Unit, _records_only, _set_whole, register_scheme


@register_scheme
@dataclass(frozen=True)
class ShuffledEpochs:
    """Every record once an epoch, in a shuffled order: accounted WITHOUT amplification.

    Given the order, a replaced record touches one batch of each epoch that has begun, so
    E epochs are E Gaussian mechanisms, and averaging over orders cannot hurt (joint convexity).
    A shuffled epoch is not a Poisson sample and gets no Poisson ε. An epoch belongs to one
    shuffle: a sampler that starts again starts another epoch, and is charged for it.
    """

    steps_per_epoch: int

    def __post_init__(self) -> None:
        if self.steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch is {self.steps_per_epoch}; give at least 1")
        _set_whole(self, "steps_per_epoch")

    def step_event(self, noise_multiplier: float, unit: Unit = Unit.RECORD) -> dpa.DpEvent:
        _records_only(self, unit)
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
        if relation is not Relation.REPLACE_ONE:
            raise UnsupportedEvent(
                f"shuffled epochs are analysed for replace-one, not {relation}: adding a record "
                "moves the others between batches; use Budget(relation=Relation.REPLACE_ONE), "
                "or PoissonSampler"
            )

    def describe(self) -> str:
        return (
            f"shuffled epochs of {self.steps_per_epoch} steps, accounted without "
            "amplification by sampling"
        )


class ShuffleSampler(Sampler):
    """Every record once an epoch, in a new random order; for comparison, replace-one only.

    Its ε is accounted without amplification, and says so. The last batch of an epoch may be
    smaller; it is divided by the declared batch size like every other.
    """

    scheme: ShuffledEpochs

    def __init__(
        self,
        data: object,
        batch_size: int,
        steps: int = 1,
        *,
        max_physical_batch: int | None = None,
        padded: bool = False,
        pad_to: int | None = None,
        seed: int | None = None,
    ) -> None:
        records = as_records(data)
        if not 0 < batch_size <= len(records):
            raise ValueError(
                f"batches of {batch_size} from {len(records)} records; "
                "give at least 1 and at most the number of records"
            )
        super().__init__(
            records,
            scheme=ShuffledEpochs(math.ceil(len(records) / batch_size)),
            steps=steps,
            expected_batch_size=batch_size,
            max_physical_batch=max_physical_batch,
            padded=padded,
            pad_to=pad_to,
            seed=seed,
        )
        self._batch_size = batch_size
        self.forget()

    def forget(self) -> None:
        self._order = np.empty(0, dtype=np.int64)
        # Another life is another epoch, even of the same number.
        self._life, self._epoch = secrets.token_hex(8), 0

    def current_epoch(self) -> Hashable:
        return self._life, self._epoch

    def draw(self, stream: Stream) -> tuple[np.ndarray, None]:
        if len(self._order) == 0:
            self._epoch += 1  # first: interrupted, the next order is never the last one's epoch
            self._order = stream.permutation(len(self.records))
        rows, self._order = self._order[: self._batch_size], self._order[self._batch_size :]
        return rows, None
