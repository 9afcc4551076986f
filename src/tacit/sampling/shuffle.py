"""Shuffled epochs: what most training code does, and what it really buys."""

from __future__ import annotations

import math
import secrets
from collections.abc import Hashable

import numpy as np

from tacit.data.records import as_records
from tacit.randomness import Stream
from tacit.sampling.sampler import Sampler
from tacit.sampling.schemes import ShuffledEpochs


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

    def occasion(self) -> Hashable:
        return self._life, self._epoch

    def draw(self, stream: Stream) -> tuple[np.ndarray, None]:
        if len(self._order) == 0:
            self._epoch += 1  # first: interrupted, the next order is never the last one's epoch
            self._order = stream.permutation(len(self.records))
        rows, self._order = self._order[: self._batch_size], self._order[self._batch_size :]
        return rows, None
