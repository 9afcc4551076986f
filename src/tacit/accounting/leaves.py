"""An event as a multiset of its leaves: composition does not care about order or nesting."""

from __future__ import annotations

import math
from collections import Counter

import dp_accounting as dpa

from tacit.errors import UnsupportedEvent
from tacit.sampling.schemes import RevealedSampleDpEvent

_SAMPLED = (
    dpa.PoissonSampledDpEvent,
    dpa.SampledWithoutReplacementDpEvent,
    RevealedSampleDpEvent,
)


def leaves_of(event: dpa.DpEvent) -> Counter[dpa.DpEvent]:
    """{leaf: how often}, with compositions unfolded and no-ops dropped."""
    leaves: Counter[dpa.DpEvent] = Counter()
    _collect(event, 1, leaves)
    return leaves


def _collect(event: dpa.DpEvent, count: int, leaves: Counter[dpa.DpEvent]) -> None:
    if isinstance(event, dpa.NoOpDpEvent) or count == 0:
        return
    if count < 0:
        raise ValueError(f"an event composed {count} times; give 0 or more")
    if isinstance(event, dpa.ComposedDpEvent):
        for part in event.events:
            _collect(part, count, leaves)
    elif isinstance(event, dpa.SelfComposedDpEvent):
        _collect(event.event, count * event.count, leaves)
    elif not _releases_nothing(event):
        leaves[event] += count


def _releases_nothing(event: dpa.DpEvent) -> bool:
    """Whether a leaf is nothing at all: infinite noise, or nobody sampled. Refuses the unknown."""
    if isinstance(event, dpa.NonPrivateDpEvent):
        return False
    if isinstance(event, dpa.GaussianDpEvent):
        return bool(event.noise_multiplier == math.inf)
    if not isinstance(event, _SAMPLED):
        raise refuse(event)
    return gaussian_inside(event) == math.inf or probability_of(event) == 0


def probability_of(event: dpa.DpEvent) -> float:
    """The chance of taking part in a leaf's step."""
    if isinstance(event, dpa.PoissonSampledDpEvent):
        return float(event.sampling_probability)
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent):
        return event.sample_size / event.source_dataset_size
    if isinstance(event, RevealedSampleDpEvent):
        return float(event.probability)
    return 1.0


def gaussian_inside(event: dpa.DpEvent) -> float:
    """The noise multiplier of the one Gaussian that a sampling event wraps."""
    inner = event.event
    if isinstance(inner, dpa.GaussianDpEvent):
        return float(inner.noise_multiplier)
    raise UnsupportedEvent(
        f"{type(event).__name__} of {type(inner).__name__} cannot be analysed; pass one "
        "GaussianDpEvent with the joint noise multiplier of all blocks, since sampling once and "
        "releasing many blocks is not many samplings"
    )


def refuse(event: dpa.DpEvent, relation: object = "either relation") -> UnsupportedEvent:
    """The error for a leaf that has no sound analysis here."""
    names = ", ".join(kind.__name__ for kind in (dpa.GaussianDpEvent, *_SAMPLED))
    return UnsupportedEvent(
        f"{event!r} has no sound analysis under {relation}; known are {names}, "
        "their compositions, NoOpDpEvent and NonPrivateDpEvent "
        "(SampledWithoutReplacementDpEvent under replace-one only)"
    )
