"""One Gaussian release made before training, told apart from another of the same cost."""

from __future__ import annotations

import hashlib

import dp_accounting as dpa
from torch import Tensor

from tacit.budget import Relation


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
