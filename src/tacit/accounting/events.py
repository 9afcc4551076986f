"""Privacy events: unfolding compositions, and releases that are charged once."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dp_accounting as dpa
from torch import Tensor

from tacit.budget import Relation
from tacit.errors import UnsupportedEvent
from tacit.sampling.mini_sets import RevealedSampleDpEvent
from tacit.sampling.repeated_runs import SelectedRunDpEvent

_PROBABILITIES: dict[type[dpa.DpEvent], Callable[[Any], float]] = {
    dpa.PoissonSampledDpEvent: lambda event: event.sampling_probability,
    dpa.SampledWithoutReplacementDpEvent: lambda e: e.sample_size / e.source_dataset_size,
    RevealedSampleDpEvent: lambda event: event.probability,
}


@dataclass(frozen=True)
class Component:
    """An event that is not a composition: one Gaussian, and the chance of taking part in it.

    Or the best of several runs. What gives everything away (`NonPrivateDpEvent`) is a Gaussian
    without noise.
    """

    event: dpa.DpEvent
    noise_multiplier: float
    probability: float = 1.0

    @property
    def is_gaussian(self) -> bool:
        """Whether it is a Gaussian in which every record takes part."""
        gaussian_or_poisson = dpa.GaussianDpEvent | dpa.PoissonSampledDpEvent
        return self.probability == 1 and isinstance(self.event, gaussian_or_poisson)


def components_of(event: dpa.DpEvent, count: int = 1) -> Counter[Component]:
    """{part: how often}, with compositions unfolded; what releases nothing is left out."""
    parts: Counter[Component] = Counter()
    if isinstance(event, dpa.NoOpDpEvent) or count == 0:
        return parts
    if count < 0:
        raise ValueError(f"an event composed {count} times; give 0 or more")
    if isinstance(event, dpa.ComposedDpEvent):
        for inner in event.events:
            parts.update(components_of(inner, count))
    elif isinstance(event, dpa.SelfComposedDpEvent):
        parts.update(components_of(event.event, count * event.count))
    else:
        part = component_of(event)
        if part.noise_multiplier < math.inf and part.probability > 0:
            parts[part] = count
    return parts


def component_of(event: dpa.DpEvent) -> Component:
    """Raises UnsupportedEvent for an event that has no analysis here."""
    if isinstance(event, dpa.NonPrivateDpEvent):
        return Component(event, 0.0)
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        if not event.noise_multiplier >= 0:
            raise ValueError(f"noise multiplier is {event.noise_multiplier}; give 0 or more")
        return Component(event, float(event.noise_multiplier), float(event.sampling_probability))
    if isinstance(event, SelectedRunDpEvent):
        # Whether it is private at all; `selection` says what it costs.
        return Component(event, min(event.noise_multiplier, event.score_noise))
    gaussian, probability = event, 1.0
    if type(event) in _PROBABILITIES:
        gaussian, probability = event.event, float(_PROBABILITIES[type(event)](event))
        if not isinstance(gaussian, dpa.GaussianDpEvent):
            raise UnsupportedEvent(
                f"{type(event).__name__} of {type(gaussian).__name__} cannot be analysed; pass one "
                "GaussianDpEvent with the joint noise multiplier of all blocks, since sampling "
                "once and releasing many blocks is not many samplings"
            )
    if not isinstance(gaussian, dpa.GaussianDpEvent):
        raise refuse(event)
    if not gaussian.noise_multiplier >= 0:
        raise ValueError(f"noise multiplier is {gaussian.noise_multiplier}; give 0 or more")
    return Component(event, float(gaussian.noise_multiplier), probability)


def refuse(event: dpa.DpEvent, relation: object = "either relation") -> UnsupportedEvent:
    """The error for a part that has no sound analysis here."""
    names = ", ".join(
        kind.__name__
        for kind in (dpa.GaussianDpEvent, *_PROBABILITIES, dpa.TruncatedSubsampledGaussianDpEvent)
    )
    return UnsupportedEvent(
        f"{event!r} has no sound analysis under {relation}; known are {names}, "
        "their compositions, NoOpDpEvent and NonPrivateDpEvent "
        "(SampledWithoutReplacementDpEvent under replace-one only)"
    )


class Release(dpa.GaussianDpEvent):
    """What a released value cost, and the name under which a ledger counts it.

    A plan pays for a number of Gaussians before its first step. Two processes that resume one run
    have one plan, and each could release a value of its own; nobody would pay for the second. So
    the name is a digest of the value: the same value again tells nothing new, and has the same
    name. `relation` is the one that the noise was made for.

    It equals any Gaussian of the same multiplier. Without a name it is one.
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
    """A name for the value: `what` was released, and a digest of it."""
    digest = hashlib.sha256(released.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    return f"{what} {digest[:32]}"
