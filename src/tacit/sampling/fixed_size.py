"""Batches of one size, drawn without replacement, anew for each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import dp_accounting as dpa
import numpy as np

from tacit.budget import Relation
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
        if not 0 < self.sample_size <= self.population:
            raise ValueError(
                f"a sample of {self.sample_size} from {self.population} records; "
                "give a sample size of at least 1 and at most the population"
            )
        set_whole_numbers(self, "population", "sample_size")

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

    Neighbours under replace-one have the same number of records, so the size may be read.
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
