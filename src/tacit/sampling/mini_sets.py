"""Mini-sets: records are put into sets once, by their id, and sets are drawn."""

from __future__ import annotations

import math

import numpy as np

from tacit.data.records import as_records
from tacit.errors import UndeclaredConstant
from tacit.randomness import Randomness, Stream
from tacit.sampling.sampler import Sampler
from tacit.sampling.schemes import MiniSets


class MiniSetSampler(Sampler):
    """Draws mini-sets of `set_size` records: `chosen` a step, or each with probability `rate`.

    Record i is in set π(i) // s, where π is a fixed public permutation of the declared ids
    0 … N−1. The partition depends on ids alone: removing a record leaves everyone else in their
    set. (Cutting a batch into sets by *position* would shift all the others.)
    """

    scheme: MiniSets

    def __init__(
        self,
        data: object,
        set_size: int,
        steps: int = 1,
        *,
        chosen: int | None = None,
        rate: float | None = None,
        partition_seed: int = 0,
        max_physical_batch: int | None = None,
        padded: bool = False,
        pad_to: int | None = None,
        seed: int | None = None,
    ) -> None:
        if set_size < 1:
            raise ValueError(f"sets of {set_size} records; give set_size at least 1")
        records = as_records(data)
        num_ids = records.num_ids or records.require_public_size("a partition into mini-sets")
        ids = records.record_ids.cpu().numpy()
        if len(ids) and not (ids.min() >= 0 and ids.max() < num_ids):
            raise UndeclaredConstant(
                f"record ids reach {ids.max()}, but ids are declared to be below {num_ids}; "
                "declare Records(..., num_ids=...) so that it covers all ids"
            )
        if len(np.unique(ids)) != len(ids):
            raise ValueError("two records have one id, so a set may be too large; make ids unique")
        scheme = MiniSets(math.ceil(num_ids / set_size), set_size, chosen=chosen, rate=rate)
        expected = scheme.probability * (records.public_size or num_ids)
        super().__init__(
            records,
            scheme=scheme,
            steps=steps,
            expected_batch_size=expected,
            max_physical_batch=max_physical_batch,
            padded=padded,
            pad_to=pad_to,
            seed=seed,
        )
        place = Randomness(partition_seed).stream("partition").permutation(num_ids)
        self.set_of_row = place[ids] // set_size
        order = np.argsort(self.set_of_row, kind="stable")
        self._rows_by_set = order
        self._starts = np.searchsorted(self.set_of_row[order], np.arange(scheme.num_sets + 1))

    def draw(self, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
        if self.scheme.chosen is None:
            sets = np.flatnonzero(stream.coins(self.scheme.num_sets, self.scheme.probability))
        else:
            sets = stream.subset(self.scheme.num_sets, self.scheme.chosen)
        starts, sizes = self._starts[sets], self._starts[sets + 1] - self._starts[sets]
        # Concatenate the ranges [start, start + size) of all drawn sets without a loop.
        ends = np.cumsum(sizes)
        offsets = np.repeat(starts - (ends - sizes), sizes)
        rows = self._rows_by_set[offsets + np.arange(ends[-1] if len(ends) else 0)]
        return rows, np.repeat(sets, sizes)
