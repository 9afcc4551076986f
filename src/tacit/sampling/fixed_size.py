"""Batches of one size, drawn afresh each step."""

from __future__ import annotations

import numpy as np

from tacit.data.records import as_records
from tacit.randomness import Stream
from tacit.sampling.sampler import Sampler
from tacit.sampling.schemes import WithoutReplacement


class FixedSizeSampler(Sampler):
    """Each step takes `batch_size` records, uniformly without replacement; replace-one only.

    Neighbours have the same number of records under replace-one, so the size may be read.
    """

    scheme: WithoutReplacement

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
        super().__init__(
            records,
            scheme=WithoutReplacement(len(records), batch_size),
            steps=steps,
            expected_batch_size=batch_size,
            max_physical_batch=max_physical_batch,
            padded=padded,
            pad_to=pad_to,
            seed=seed,
        )

    def draw(self, stream: Stream) -> tuple[np.ndarray, None]:
        return stream.subset(self.scheme.population, self.scheme.sample_size), None
