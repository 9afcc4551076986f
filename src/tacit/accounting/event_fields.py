"""Privacy events as plain fields, which any accountant can read: what a privacy statement holds.

    kind                                   fields besides noise_multiplier, count, relation
    gaussian                               none
    poisson_sampled_gaussian               sampling_rate
    truncated_poisson_sampled_gaussian     sampling_rate, population, max_batch_size
    sampled_without_replacement_gaussian   population, sample_size
    revealed_sample_gaussian               sampling_rate
    best_of_repeated_runs                  sampling_rate, steps, score_noise, mean_runs, shape

`noise_multiplier` z is the standard deviation of the noise over the most by which one unit moves
what is released, under `relation`; 0 is no noise. Everything below is in units of that most. A unit
is a record, or a mini-set where whole sets are sampled. `count` says how often the release was
made, each time with a fresh sample. The pair of distributions that a release is accounted by is,
with q the sampling rate, N(m) the normal distribution of mean m and standard deviation z:

    gaussian            N(1) against N(0), under either relation
    poisson, add/remove (1 − q)·N(0) + q·N(1) against N(0), and the reverse
    poisson, replace    (1 − q)·N(0) + q·N(½) against (1 − q)·N(0) + q·N(−½)
    truncated           the Poisson pair with probability 1 − τ, and with probability τ that of half
                        the noise; τ = P(Bin(population, q) ≥ max_batch_size)
    without replacement the curve C_p of the Gaussian, p = sample_size / population; replace only
    revealed            with probability q the Gaussian, else nothing; everybody sees which

The best of repeated runs has no such pair: `selection` has its bounds. Each of the secret number of
runs is `steps` Poisson-sampled Gaussians and one Gaussian of multiplier `score_noise`.

The proofs are in `dominating_pairs`, and in the samplers that make these events.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import dp_accounting as dpa

from tacit.accounting.events import Component, components_of
from tacit.budget import Relation
from tacit.errors import UnsupportedEvent, shown
from tacit.sampling.mini_sets import RevealedSampleDpEvent
from tacit.sampling.repeated_runs import NumRuns, SelectedRunDpEvent

_RATE, _POPULATION = "sampling_rate", "population"
# The fields of each kind, besides those that all kinds have.
KINDS: dict[str, tuple[str, ...]] = {
    "gaussian": (),
    "poisson_sampled_gaussian": (_RATE,),
    "truncated_poisson_sampled_gaussian": (_RATE, _POPULATION, "max_batch_size"),
    "sampled_without_replacement_gaussian": (_POPULATION, "sample_size"),
    "revealed_sample_gaussian": (_RATE,),
    "best_of_repeated_runs": (_RATE, "steps", "score_noise", "mean_runs", "shape"),
}


def event_to_fields(event: dpa.DpEvent, relation: Relation) -> list[dict[str, Any]]:
    """The parts of an event, each as fields; compositions are unfolded."""
    return [
        {
            **({"noise_multiplier": part.noise_multiplier} | _kind_of(part)),
            "count": count,
            "relation": relation.value,
        }
        for part, count in components_of(event).items()
    ]


def _kind_of(part: Component) -> dict[str, Any]:
    event, rate = part.event, part.probability
    if isinstance(event, dpa.GaussianDpEvent | dpa.NonPrivateDpEvent):
        return {"kind": "gaussian"}
    if isinstance(event, dpa.PoissonSampledDpEvent):
        return {"kind": "poisson_sampled_gaussian", _RATE: rate}
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        return {
            "kind": "truncated_poisson_sampled_gaussian",
            _RATE: rate,
            _POPULATION: int(event.dataset_size),
            "max_batch_size": int(event.truncated_batch_size),
        }
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent):
        return {
            "kind": "sampled_without_replacement_gaussian",
            _POPULATION: int(event.source_dataset_size),
            "sample_size": int(event.sample_size),
        }
    if isinstance(event, RevealedSampleDpEvent):
        return {"kind": "revealed_sample_gaussian", _RATE: rate}
    if isinstance(event, SelectedRunDpEvent):
        return {
            "kind": "best_of_repeated_runs",
            "noise_multiplier": event.noise_multiplier,
            _RATE: event.rate,
            "steps": event.steps,
            "score_noise": event.score_noise,
            "mean_runs": event.runs.mean,
            "shape": event.runs.shape,
        }
    raise UnsupportedEvent(f"{event!r} has no form as plain fields; known are {', '.join(KINDS)}")


def event_from_fields(parts: Sequence[Mapping[str, Any]]) -> tuple[dpa.DpEvent, Relation | None]:
    """All parts as one event, and the relation that it is accounted under; None if there is none.

    Raises ValueError, which names the part and the field, for anything but what `event_to_fields`
    writes. Fields that begin with "what" are words, and are passed over.
    """
    events, relations = [], set()
    for number, part in enumerate(parts):
        where = f"events[{number}]"
        try:
            events.append(_read(part, where))
            relations.add(Relation(part["relation"]))
        except KeyError as error:
            raise ValueError(f"{where} has no {error}") from error
    if len(relations) > 1:
        raise ValueError(
            "the events are for two neighbouring relations, and say nothing together; give all of "
            "them for one"
        )
    return dpa.ComposedDpEvent(events), next(iter(relations), None)


def _read(part: Mapping[str, Any], where: str) -> dpa.DpEvent:
    kind = part["kind"]
    if kind not in KINDS:
        raise ValueError(f"{where}.kind is {shown(kind)}; known are {', '.join(KINDS)}")
    known = {"kind", "noise_multiplier", "count", "relation", "what", *KINDS[kind]}
    if unknown := sorted(set(part) - known):
        raise ValueError(f"{where} has {unknown[0]!r}, which {kind} does not have")
    z, count = part["noise_multiplier"], _count(part, "count", where)
    if type(z) not in (int, float) or not 0 <= z < math.inf:
        raise ValueError(f"{where}.noise_multiplier is {shown(z)}; it is a number, 0 or more")
    gaussian = dpa.GaussianDpEvent(float(z))
    if kind == "gaussian":
        return dpa.SelfComposedDpEvent(gaussian, count)
    if kind == "sampled_without_replacement_gaussian":
        population, size = (_count(part, name, where) for name in KINDS[kind])
        if size > population:
            raise ValueError(f"{where}.sample_size is {size}, more than the population")
        once = dpa.SampledWithoutReplacementDpEvent(population, size, gaussian)
        return dpa.SelfComposedDpEvent(once, count)
    rate = part[_RATE]
    if type(rate) not in (int, float) or not 0 < rate <= 1:
        raise ValueError(f"{where}.{_RATE} is {shown(rate)}; it is a probability above 0")
    if kind == "poisson_sampled_gaussian":
        return dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(float(rate), gaussian), count)
    if kind == "revealed_sample_gaussian":
        return dpa.SelfComposedDpEvent(RevealedSampleDpEvent(float(rate), gaussian), count)
    if kind == "best_of_repeated_runs":
        runs = NumRuns(part["mean_runs"], part["shape"])
        steps, score = _count(part, "steps", where), float(part["score_noise"])
        selected = SelectedRunDpEvent(float(rate), float(z), steps, score, runs)
        return dpa.SelfComposedDpEvent(selected, count)
    population, cap = (_count(part, name, where) for name in KINDS[kind][1:])
    once = dpa.TruncatedSubsampledGaussianDpEvent(population, float(rate), cap, float(z))
    return dpa.SelfComposedDpEvent(once, count)


def _count(part: Mapping[str, Any], name: str, where: str) -> int:
    value = part[name]
    if type(value) is not int or not 1 <= value < 2**53:
        raise ValueError(f"{where}.{name} is {shown(value)}; it is a whole number, 1 or more")
    return value
