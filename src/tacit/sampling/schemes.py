"""Sampling schemes: who is in a batch, as plain data, and the event that a Gaussian becomes.

Conventions. The noise multiplier z is the noise's standard deviation over the L2 sensitivity
*under the relation in force*. Events are dp-accounting's, read in that convention by
`tacit.accounting`; a step that touches nobody's data is `NoOpDpEvent`.

The contract of a scheme, and the decorator for schemes of one's own, are in `registry`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import attr
import dp_accounting as dpa

from tacit.budget import Relation
from tacit.errors import UnsupportedEvent
from tacit.sampling.registry import Scheme, Unit, register_scheme
from tacit.sampling.whole_number import whole_number

__all__ = [
    "MiniSets",
    "Poisson",
    "RevealedSampleDpEvent",
    "Scheme",
    "ShuffledEpochs",
    "Unit",
    "WithoutReplacement",
    "accounted_relation",
]


def accounted_relation(relation: Relation, unit: Unit) -> Relation:
    """The relation between sampled units that one record's change amounts to.

    A record added to a mini-set turns one clipped contribution into another, so to the
    accountant a mini-set has been replaced, whatever happened to the record.
    """
    return Relation.REPLACE_ONE if unit is Unit.MINI_SET else relation


def _records_only(scheme: object, unit: Unit) -> None:
    """Sets that are cut from a sample of records were not sampled as sets: no pair covers them."""
    if unit is not Unit.RECORD:
        raise UnsupportedEvent(
            f"{type(scheme).__name__} samples records, and the query bounds a {unit.value}; "
            "draw mini-sets with MiniSetSampler"
        )


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RevealedSampleDpEvent(dpa.DpEvent):
    """A Gaussian seen with probability p by somebody who is told whether it took place.

    Dominating pair: p·N(1, z²) + (1−p)·⊥ against p·N(0, z²) + (1−p)·⊥, whose privacy profile is
    δ(ε) = p·δ_Gauss(ε) for ε ≥ 0. It is what is left of amplification when the rest of the
    batch gives the choice away.
    """

    probability: float
    event: dpa.DpEvent


def _check_probability(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} is {value!r}; give a probability above 0 and at most 1")


def _set_float(scheme: object, name: str) -> None:
    """A Python float in the place of one of NumPy's, which JSON does not know."""
    object.__setattr__(scheme, name, float(getattr(scheme, name)))


def _set_whole(scheme: object, *names: str) -> None:
    for name in names:
        object.__setattr__(scheme, name, whole_number(name, getattr(scheme, name), least=1))


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


@register_scheme
@dataclass(frozen=True)
class MiniSets:
    """A data-independent partition into `num_sets` sets of `set_size` records, sets being drawn.

    Either `chosen` sets a step without replacement, or each set with probability `rate`.

    Amplification holds for what is sampled, which is sets. A query that bounds a whole set's
    contribution (Unit.MINI_SET) is amplified as sampled records are. A query that bounds each
    record's contribution (Unit.RECORD) is not: the other records of the set may move the sum by
    far more than the noise and so give away whether the set was drawn. Then only the
    probability of being drawn counts (`RevealedSampleDpEvent`), except for sets of one record.
    """

    num_sets: int
    set_size: int
    chosen: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.chosen is None) == (self.rate is None):
            raise ValueError("give either chosen (sets a step) or rate (probability of a set)")
        if self.num_sets < 1 or self.set_size < 1:
            raise ValueError(f"{self.num_sets} sets of {self.set_size} records; give at least 1")
        _set_whole(self, "num_sets", "set_size")
        if self.rate is not None:
            _check_probability("rate of a mini-set", self.rate)
            _set_float(self, "rate")
        elif self.chosen is not None and not 0 < self.chosen <= self.num_sets:
            raise ValueError(f"{self.chosen} of {self.num_sets} sets; give 1 up to {self.num_sets}")
        else:
            _set_whole(self, "chosen")

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

    def num_events(self, steps: int) -> int:
        return steps

    def steps_within(self, events: int) -> int:
        return events

    def epochs(self, steps: int) -> float:
        return steps * self.probability

    def amplifies(self) -> bool:
        return self.probability < 1

    def require(self, relation: Relation) -> None:
        if self.chosen is not None and self.set_size == 1:
            WithoutReplacement(self.num_sets, self.chosen).require(relation)

    def describe(self) -> str:
        how = (
            f"each with probability {self.rate:.6g}"
            if self.chosen is None
            else f"{self.chosen} a step without replacement"
        )
        return f"mini-sets, {self.num_sets} of {self.set_size} records, {how}"


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
