"""Mini-sets: records are put into sets once, by their id, and then whole sets are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import attr
import dp_accounting as dpa
import numpy as np

from tacit.budget import Relation
from tacit.randomness import Randomness, Stream
from tacit.records import as_records
from tacit.sampling.fixed_size import WithoutReplacement
from tacit.sampling.sampler import Sampler, SamplerOptions
from tacit.sampling.scheme import (
    Scheme,
    Unit,
    register_scheme,
    set_probability,
    set_whole_numbers,
    whole_number,
)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RevealedSampleDpEvent(dpa.DpEvent):
    """A Gaussian that takes place with probability p, seen by somebody who knows whether it did.

    Dominating pair: p·N(1, z²) + (1−p)·⊥ against p·N(0, z²) + (1−p)·⊥, whose privacy profile is
    δ(ε) = p·δ_Gauss(ε) for ε ≥ 0. This is what is left of amplification when the rest of the
    batch reveals the choice.
    """

    probability: float
    event: dpa.DpEvent


@register_scheme
@dataclass(frozen=True)
class MiniSets(Scheme):
    """A data-independent partition into `num_sets` sets of `set_size` records; sets are drawn.

    Each step draws `chosen` sets without replacement, or each set with probability `rate`.

    Amplification holds for what is sampled, which is sets. A query that bounds a whole set's
    contribution (Unit.MINI_SET) is amplified as sampled records are. A query that bounds each
    record's contribution (Unit.RECORD) is not: the other records of the set may move the sum by
    far more than the noise and so reveal whether the set was drawn. Then only the probability of
    being drawn counts (`RevealedSampleDpEvent`), except for sets of one record.
    """

    num_sets: int
    set_size: int
    chosen: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.chosen is None) == (self.rate is None):
            raise ValueError("give either chosen (sets per step) or rate (probability of a set)")
        set_whole_numbers(self, "num_sets", "set_size")
        if self.rate is not None:
            set_probability(self, "rate", "rate of a mini-set")
        else:
            set_whole_numbers(self, "chosen")
            assert self.chosen is not None
            if self.chosen > self.num_sets:
                raise ValueError(f"chosen: {self.chosen} of {self.num_sets} mini-sets; give fewer")

    @property
    def probability(self) -> float:
        """The chance that a given set takes part in a step."""
        return self.rate if self.chosen is None else self.chosen / self.num_sets  # type: ignore[return-value]

    def step_event(self, noise_multiplier: float, unit: Unit = Unit.RECORD) -> dpa.DpEvent:
        gaussian = dpa.GaussianDpEvent(noise_multiplier)
        if unit is Unit.RECORD and self.set_size > 1:
            return RevealedSampleDpEvent(self.probability, gaussian)
        if self.chosen is None:
            return dpa.PoissonSampledDpEvent(self.probability, gaussian)
        return dpa.SampledWithoutReplacementDpEvent(self.num_sets, self.chosen, gaussian)

    def epochs(self, steps: int) -> float:
        return steps * self.probability

    def amplifies(self) -> bool:
        return self.probability < 1

    def require(self, relation: Relation) -> None:
        if self.chosen is not None and self.set_size == 1:
            WithoutReplacement(self.num_sets, self.chosen).require(relation)

    def describe(self) -> str:
        how = f"{self.chosen} per step without replacement"
        if self.chosen is None:
            how = f"each with probability {self.rate:.6g}"
        return f"mini-sets, {self.num_sets} of {self.set_size} records, {how}"


class MiniSetSampler(Sampler):
    """Draws mini-sets of `set_size` records: `chosen` per step, or each with probability `rate`.

    Record i is in set π(i) // s, where π is a fixed public permutation of the declared ids
    0 … N−1, made from `partition_seed`. The partition depends on ids alone: removing a record
    leaves everyone else in their set. (Cutting a batch into sets by *position* would shift all the
    others.) Other arguments: see `Sampler`.

    Example:
        >>> sampler = tacit.MiniSetSampler(train, set_size=8, steps=1000, chosen=32)
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
        **options: Unpack[SamplerOptions],
    ) -> None:
        records = as_records(data)
        num_ids = records.require_num_ids("a partition into mini-sets")
        ids = records.record_ids.cpu().numpy()
        if len(np.unique(ids)) != len(ids):
            raise ValueError("two records have one id, so a set may be too large; make ids unique")
        num_sets = math.ceil(num_ids / whole_number("set_size", set_size, least=1))
        scheme = MiniSets(num_sets, set_size, chosen=chosen, rate=rate)
        expected = scheme.probability * (records.public_size or num_ids)
        super().__init__(
            records, scheme=scheme, steps=steps, expected_batch_size=expected, **options
        )
        place = Randomness(partition_seed).stream("partition").permutation(num_ids)
        self.set_of_row = place[ids] // set_size
        self._rows_by_set = np.argsort(self.set_of_row, kind="stable")
        in_order = self.set_of_row[self._rows_by_set]
        self._starts = np.searchsorted(in_order, np.arange(num_sets + 1))

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
