"""Batches of one size, drawn afresh each step.

Batches of one size, drawn afresh each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import attr
import dp_accounting as dpa
import numpy as np

from tacit.budget import Relation
from tacit.errors import UnsupportedEvent
from tacit.randomness import Stream
from tacit.records import as_records
from tacit.sampling.sampler import Sampler
from tacit.sampling.scheme import Unit, _records_only, _set_whole, register_scheme


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RevealedSampleDpEvent(dpa.DpEvent):
    """A Gaussian seen with probability p by somebody who is told whether it took place.

    Dominating pair: p·N(1, z²) + (1−p)·⊥ against p·N(0, z²) + (1−p)·⊥, whose privacy profile is
    δ(ε) = p·δ_Gauss(ε) for ε ≥ 0. It is what is left of amplification when the rest of the
    batch gives the choice away.
    """

    probability: float
    event: dpa.DpEvent


@register_scheme
@dataclass(frozen=True)
class WithoutReplacement:
    """Each step takes `sample_size` of `population` records, all subsets equally likely."""

    population: int
    sample_size: int

    def __post_init__(self) -> None:
        if not 0 < self.sample_size <= self.population:
            raise ValueError(
                f"a sample of {self.sample_size} from {self.population} records; "
                "give a sample size of at least 1 and at most the population"
            )
        _set_whole(self, "population", "sample_size")

    def step_event(self, noise_multiplier: float, unit: Unit = Unit.RECORD) -> dpa.DpEvent:
        _records_only(self, unit)
        gaussian = dpa.GaussianDpEvent(noise_multiplier)
        return dpa.SampledWithoutReplacementDpEvent(self.population, self.sample_size, gaussian)

    def num_events(self, steps: int) -> int:
        return steps

    def steps_within(self, events: int) -> int:
        return events

    def epochs(self, steps: int) -> float:
        return steps * self.sample_size / self.population

    def amplifies(self) -> bool:
        return self.sample_size < self.population

    def require(self, relation: Relation) -> None:
        if relation is not Relation.REPLACE_ONE:
            raise UnsupportedEvent(
                f"batches of a fixed size are analysed for replace-one, not {relation}: adding a "
                "record changes who else is drawn; use Budget(relation=Relation.REPLACE_ONE), "
                "or PoissonSampler"
            )

    def describe(self) -> str:
        return f"fixed size, {self.sample_size} of {self.population} without replacement"


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
