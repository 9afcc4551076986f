"""How much privacy may be spent, and against which neighbour."""

from __future__ import annotations

import enum
import math
import numbers
from dataclasses import dataclass

from tacit.errors import argument, shown


class Relation(enum.Enum):
    """Which two datasets count as neighbours.

    ADD_OR_REMOVE_ONE: one has a record that the other lacks (sizes differ by one).
    REPLACE_ONE: same size, one record is another one. A sum of vectors of norm at most C
    moves by C under the first and by 2C under the second.
    """

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"

    def __repr__(self) -> str:
        return f"Relation.{self.name}"

    def __str__(self) -> str:
        return self.value

    def sensitivity(self, bound: float) -> float:
        """How far one record moves a sum of vectors of norm at most `bound`."""
        return bound if self is Relation.ADD_OR_REMOVE_ONE else 2 * bound


@dataclass(frozen=True)
class Budget:
    """(ε, δ) and the neighbouring relation that they are for.

    M is (ε, δ)-DP when P[M(D) ∈ S] ≤ e^ε P[M(D') ∈ S] + δ for all neighbours D, D' and all S.
    """

    epsilon: float
    delta: float
    relation: Relation = Relation.ADD_OR_REMOVE_ONE

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "relation", Relation(self.relation))
        except ValueError:
            raise ValueError(
                f"{argument('relation')} is {shown(self.relation)}; give "
                f"{' or '.join(repr(r.value) for r in Relation)}"
            ) from None
        if not isinstance(self.epsilon, numbers.Real) or not 0 < self.epsilon < math.inf:
            raise ValueError(
                f"{argument('epsilon')} is {shown(self.epsilon)}; give a finite number above 0"
            )
        require_delta(self.delta)


def require_delta(delta: float) -> None:
    """Refuse a delta that promises nothing."""
    if not isinstance(delta, numbers.Real) or not 0 < delta < 1:
        raise ValueError(
            f"{argument('delta')} is {shown(delta)}; give a number strictly between 0 and 1, well "
            "below one over the number of records"
        )
