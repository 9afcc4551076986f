"""Poisson sampling: every record decides for itself.

Poisson sampling: every record decides for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import dp_accounting as dpa
import numpy as np

from tacit.budget import Relation
from tacit.randomness import Stream
from tacit.records import as_records
from tacit.sampling.sampler import Sampler
from tacit.sampling.scheme import (
    Unit,
    _check_probability,
    _records_only,
    _set_float,
    register_scheme,
)


@register_scheme
@dataclass(frozen=True)
class Poisson:
    """Each record takes part in each step with probability `rate`, independently of all others."""

    rate: float

    def __post_init__(self) -> None:
        _check_probability("sampling rate", self.rate)
        _set_float(self, "rate")

    def step_event(self, noise_multiplier: float, unit: Unit = Unit.RECORD) -> dpa.DpEvent:
        _records_only(self, unit)
        return dpa.PoissonSampledDpEvent(self.rate, dpa.GaussianDpEvent(noise_multiplier))

    def num_events(self, steps: int) -> int:
        return steps

    def steps_within(self, events: int) -> int:
        return events

    def epochs(self, steps: int) -> float:
        return steps * self.rate

    def amplifies(self) -> bool:
        return self.rate < 1

    def require(self, relation: Relation) -> None:
        return None

    def describe(self) -> str:
        return f"Poisson, rate {self.rate:.6g}"


_MOST_COINS_PER_RECORD = 16


class PoissonSampler(Sampler):
    """Each record takes part in each step with probability q, independently.

    q and the expected batch size are public constants that the user declares. Either follows
    from the other when the data has a declared `public_size` N, by q = batch / N; neither is
    ever read off `len(data)`, which differs between neighbours.
    """

    scheme: Poisson

    def __init__(
        self,
        data: object,
        sampling_rate: float | None = None,
        steps: int = 1,
        *,
        expected_batch_size: float | None = None,
        max_physical_batch: int | None = None,
        padded: bool = False,
        pad_to: int | None = None,
        seed: int | None = None,
    ) -> None:
        records = as_records(data)
        if sampling_rate is None and expected_batch_size is None:
            raise ValueError("give sampling_rate, expected_batch_size, or both")
        if sampling_rate is None:
            assert expected_batch_size is not None
            size = records.require_public_size("a sampling rate from a batch size")
            sampling_rate = expected_batch_size / size
            if sampling_rate > 1:
                raise ValueError(
                    f"expected_batch_size {expected_batch_size} is more than the {size} records"
                )
        elif expected_batch_size is None:
            size = records.require_public_size("an expected batch size from a sampling rate")
            expected_batch_size = sampling_rate * size
        super().__init__(
            records,
            scheme=Poisson(sampling_rate),
            steps=steps,
            expected_batch_size=expected_batch_size,
            max_physical_batch=max_physical_batch,
            padded=padded,
            pad_to=pad_to,
            seed=seed,
        )
        ids = records.record_ids.cpu().numpy()
        self._num_coins = len(ids)
        self._coin_of_row: np.ndarray | None = None
        if not np.array_equal(ids, np.arange(len(ids))):
            top = int(ids.max()) + 1
            # Ids that are spread too thinly to have a coin each, and ids that are shared: then the
            # coins go by rows. Two records with one coin would not be sampled independently.
            dense = ids.min() >= 0 and top <= _MOST_COINS_PER_RECORD * len(ids) + (1 << 20)
            if dense and len(np.unique(ids)) == len(ids):
                self._num_coins, self._coin_of_row = top, ids

    def draw(self, stream: Stream) -> tuple[np.ndarray, None]:
        """Toss the coin of each record id, so that nobody's coin depends on who else is there."""
        coins = stream.coins(self._num_coins, self.scheme.rate)
        return np.flatnonzero(
            coins if self._coin_of_row is None else coins[self._coin_of_row]
        ), None
