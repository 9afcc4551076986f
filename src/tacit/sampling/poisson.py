"""Poisson sampling: every record takes part with the same probability, independently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import dp_accounting as dpa
import numpy as np

from tacit.errors import argument
from tacit.randomness import Stream
from tacit.records import as_records
from tacit.sampling.sampler import Sampler, SamplerOptions
from tacit.sampling.scheme import (
    Scheme,
    Unit,
    register_scheme,
    require_batch_size,
    require_records,
    set_probability,
    set_whole_numbers,
)


@register_scheme
@dataclass(frozen=True)
class Poisson(Scheme):
    """Each record takes part in each step with probability `rate`, independently of all others."""

    rate: float

    def __post_init__(self) -> None:
        set_probability(self, "rate", "sampling rate")

    def step_event(self, noise_multiplier: float, unit: Unit = Unit.RECORD) -> dpa.DpEvent:
        require_records(self, unit)
        return dpa.PoissonSampledDpEvent(self.rate, dpa.GaussianDpEvent(noise_multiplier))

    def epochs(self, steps: int) -> float:
        return steps * self.rate

    def amplifies(self) -> bool:
        return self.rate < 1

    def describe(self) -> str:
        return f"Poisson, rate {self.rate:.6g}"


@register_scheme
@dataclass(frozen=True)
class TruncatedPoisson(Scheme):
    """Poisson sampling with at most `max_batch_size` of at most `population` records per step.

    Each record is drawn with probability `rate`, independently. Of a draw above the cap, a
    uniformly random subset of `max_batch_size` records takes part. Both neighbouring relations are
    proved in `tacit.accounting.dominating_pairs`.
    """

    rate: float
    max_batch_size: int
    population: int

    def __post_init__(self) -> None:
        set_probability(self, "rate", "sampling rate")
        set_whole_numbers(self, "max_batch_size", "population")

    def step_event(self, noise_multiplier: float, unit: Unit = Unit.RECORD) -> dpa.DpEvent:
        require_records(self, unit)
        return dpa.TruncatedSubsampledGaussianDpEvent(
            self.population, self.rate, self.max_batch_size, noise_multiplier
        )

    def epochs(self, steps: int) -> float:
        return steps * min(self.rate, self.max_batch_size / self.population)

    def amplifies(self) -> bool:
        return True

    def describe(self) -> str:
        return (
            f"Poisson, rate {self.rate:.6g}, truncated to {self.max_batch_size} of "
            f"{self.population} records"
        )


_MOST_COINS_PER_RECORD = 16


class PoissonSampler(Sampler):
    """Each record takes part in each step with probability q, independently.

    q and the expected batch size are public constants that the user declares. Either follows
    from the other when the data has a declared `public_size` N, by q = batch / N. Neither is ever
    read from `len(data)`, which differs between neighbours. Other arguments: see `Sampler`.

    With `max_batch_size` no batch has more records: of a larger draw, a uniformly random subset
    takes part, and the scheme is `TruncatedPoisson`, whose ε counts that. The data must have a
    declared `public_size`, and not more records than that.

    Example:
        >>> sampler = tacit.PoissonSampler(train, expected_batch_size=256, epochs=20)
        >>> sampler = tacit.PoissonSampler(train, expected_batch_size=256, max_batch_size=384)
    """

    scheme: Poisson | TruncatedPoisson

    def __init__(
        self,
        data: object,
        sampling_rate: float | None = None,
        steps: int = 1,
        *,
        expected_batch_size: float | None = None,
        max_batch_size: int | None = None,
        **options: Unpack[SamplerOptions],
    ) -> None:
        records = as_records(data)
        if sampling_rate is None:
            if expected_batch_size is None:
                raise ValueError("give sampling_rate, expected_batch_size, or both")
            require_batch_size(expected_batch_size)
            size = records.require_public_size("a sampling rate from a batch size")
            sampling_rate = expected_batch_size / size
            if sampling_rate > 1:
                raise ValueError(
                    f"{argument('expected_batch_size', '--batch-size')} is {expected_batch_size}, "
                    f"more than the {size} records; give at most {size}, the declared "
                    f"{argument('public_size')}"
                )
        elif expected_batch_size is None:
            size = records.require_public_size("an expected batch size from a sampling rate")
            expected_batch_size = Poisson(sampling_rate).rate * size
        scheme: Poisson | TruncatedPoisson = Poisson(sampling_rate)
        if max_batch_size is not None:
            size = records.require_public_size("a cap on the batch size")
            if len(records) > size:
                raise ValueError(
                    f"the data has more records than its declared {argument('public_size')}, "
                    f"{size}, and the cost of a cap depends on their number; declare at least as "
                    "many"
                )
            scheme = TruncatedPoisson(sampling_rate, max_batch_size, size)
        super().__init__(
            records,
            scheme=scheme,
            steps=steps,
            expected_batch_size=expected_batch_size,
            **options,
        )
        ids = records.record_ids.cpu().numpy()
        self._num_coins = len(ids)
        self._coin_of_row: np.ndarray | None = None
        if not np.array_equal(ids, np.arange(len(ids))):
            top = int(ids.max()) + 1
            # Sparse ids would need too many coins, and records that share an id would share a
            # coin, so that they are not sampled independently. Then coins belong to rows.
            dense = ids.min() >= 0 and top <= _MOST_COINS_PER_RECORD * len(ids) + (1 << 20)
            if dense and len(np.unique(ids)) == len(ids):
                self._num_coins, self._coin_of_row = top, ids

    def draw(self, stream: Stream) -> tuple[np.ndarray, None]:
        """Toss the coin of each record id, so that no coin depends on who else is there."""
        coins = stream.coins(self._num_coins, self.scheme.rate)
        drawn = coins if self._coin_of_row is None else coins[self._coin_of_row]
        rows = np.flatnonzero(drawn)
        cap = self._max_batch_size
        if cap is None or len(rows) <= cap:
            return rows, None
        # The coins have read the first bits of this stream; the subset has a stream of its own.
        return np.sort(rows[stream.derived("truncation").subset(len(rows), cap)]), None

    @property
    def _has_one_shape(self) -> bool:
        if self.padded is None and self.pad_to is None:
            return self.device.type == "cuda" and self.scheme.rate < 1
        return super()._has_one_shape

    @property
    def _max_batch_size(self) -> int | None:
        return getattr(self.scheme, "max_batch_size", None)

    @property
    def capacity(self) -> int:
        """Rows of a padded physical batch: at most the cap."""
        cap = self._max_batch_size
        if cap is None or (self.max_physical_batch or cap) < cap:
            return super().capacity
        return min(cap, super().capacity) if self._num_ranks > 1 else cap
