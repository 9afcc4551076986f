"""An event as a multiset of its leaves: composition does not care about order or nesting."""

from __future__ import annotations

from collections import Counter

import dp_accounting as dpa

from tacit.errors import UnsupportedEvent
from tacit.sampling.schemes import RevealedSampleDpEvent


def leaves_of(event: dpa.DpEvent) -> Counter[dpa.DpEvent]:
    """{leaf: how often}, with compositions unfolded and no-ops dropped."""
    leaves: Counter[dpa.DpEvent] = Counter()
    _collect(event, 1, leaves)
    return leaves


def _collect(event: dpa.DpEvent, count: int, leaves: Counter[dpa.DpEvent]) -> None:
    if isinstance(event, dpa.NoOpDpEvent) or count == 0:
        return
    if isinstance(event, dpa.ComposedDpEvent):
        for part in event.events:
            _collect(part, count, leaves)
    elif isinstance(event, dpa.SelfComposedDpEvent):
        _collect(event.event, count * event.count, leaves)
    else:
        leaves[event] += count


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


def refuse(event: dpa.DpEvent, relation: object) -> UnsupportedEvent:
    """The error for a leaf that has no sound analysis here."""
    known = (
        dpa.GaussianDpEvent,
        dpa.PoissonSampledDpEvent,
        dpa.SampledWithoutReplacementDpEvent,
        RevealedSampleDpEvent,
    )
    names = ", ".join(kind.__name__ for kind in known)
    return UnsupportedEvent(
        f"{event!r} has no sound analysis under {relation}; known are {names}, "
        "their compositions, NoOpDpEvent and NonPrivateDpEvent "
        "(SampledWithoutReplacementDpEvent under replace-one only)"
    )
