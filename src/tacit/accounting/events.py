"""Privacy events: unfolding compositions, and releases that are charged once."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import dp_accounting as dpa
from torch import Tensor

from tacit.budget import Relation
from tacit.errors import UnsupportedEvent
from tacit.sampling.mini_sets import RevealedSampleDpEvent

_SAMPLED = (
    dpa.PoissonSampledDpEvent,
    dpa.SampledWithoutReplacementDpEvent,
    RevealedSampleDpEvent,
)


def components_of(event: dpa.DpEvent) -> Counter[dpa.DpEvent]:
    """{part: how often}, with compositions unfolded and no-ops dropped."""
    parts: Counter[dpa.DpEvent] = Counter()
    _collect(event, 1, parts)
    return parts


def _collect(event: dpa.DpEvent, count: int, parts: Counter[dpa.DpEvent]) -> None:
    if isinstance(event, dpa.NoOpDpEvent) or count == 0:
        return
    if count < 0:
        raise ValueError(f"an event composed {count} times; give 0 or more")
    if isinstance(event, dpa.ComposedDpEvent):
        for part in event.events:
            _collect(part, count, parts)
    elif isinstance(event, dpa.SelfComposedDpEvent):
        _collect(event.event, count * event.count, parts)
    elif not _releases_nothing(event):
        parts[event] += count


def _releases_nothing(event: dpa.DpEvent) -> bool:
    """Whether a part is nothing at all: infinite noise, or nobody sampled. Refuses the unknown."""
    if isinstance(event, dpa.NonPrivateDpEvent):
        return False
    if isinstance(event, dpa.GaussianDpEvent):
        return bool(event.noise_multiplier == math.inf)
    if not isinstance(event, _SAMPLED):
        raise refuse(event)
    return gaussian_inside(event) == math.inf or probability_of(event) == 0


def probability_of(event: dpa.DpEvent) -> float:
    """The chance of taking part in a part's step."""
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
    """The error for a part that has no sound analysis here."""
    names = ", ".join(kind.__name__ for kind in (dpa.GaussianDpEvent, *_SAMPLED))
    return UnsupportedEvent(
        f"{event!r} has no sound analysis under {relation}; known are {names}, "
        "their compositions, NoOpDpEvent and NonPrivateDpEvent "
        "(SampledWithoutReplacementDpEvent under replace-one only)"
    )


class Release(dpa.GaussianDpEvent):
    """What a released value cost, and the name under which a ledger counts it.

    A plan pays for so many Gaussians before its first step. Two processes that go on with one run
    have one plan, and each could release a value of its own; the second would be paid by nobody.
    So the name is a digest of the value. The same value again tells nothing new, and has the same
    name. `relation` is the one that the noise was made for.

    It equals any Gaussian of the same multiplier, in a plan and outside. Without a name it is one.
    """

    def __init__(
        self, noise_multiplier: float, name: str = "", relation: Relation | None = None
    ) -> None:
        super().__init__(float(noise_multiplier))
        object.__setattr__(self, "name", name)  # events are frozen
        object.__setattr__(self, "relation", relation)

    def serves(self, relation: Relation) -> bool:
        """Noise for a replacement is twice what adding or removing needs, and not the reverse."""
        return self.relation in (None, relation, Relation.REPLACE_ONE)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dpa.GaussianDpEvent):
            return NotImplemented
        return bool(self.noise_multiplier == other.noise_multiplier)

    def __hash__(self) -> int:
        return hash(dpa.GaussianDpEvent(self.noise_multiplier))

    def __reduce__(self) -> tuple:
        return Release, (self.noise_multiplier, self.name, self.relation)


def name_of(what: str, released: Tensor) -> str:
    """What was released, and a digest of it."""
    digest = hashlib.sha256(released.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    return f"{what} {digest[:32]}"
