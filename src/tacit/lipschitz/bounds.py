"""What is known about one record on its way through a network, and the three answers of a layer.

All norms are L2 over everything that one record has at that point: all channels, all positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Bound:
    """One record's tensor: the largest norm it can have, and its shape without the batch."""

    norm: float
    shape: tuple[int, ...]

    @property
    def positions(self) -> int:
        """How many positions share a channel's parameters where channels come first."""
        return math.prod(self.shape[1:])

    @property
    def tokens(self) -> int:
        """How many rows share a linear layer's weights: all but the last axis."""
        return math.prod(self.shape[:-1])


@runtime_checkable
class Bounded(Protocol):
    """A layer that answers three questions, each from above, for every record within `x`.

    It must treat each record by itself. Whoever writes one has it attacked by
    `tacit.lipschitz.audit_layer`.
    """

    def output_norm(self, x: Bound) -> float:
        """max ‖f(x)‖ over ‖x‖ ≤ x.norm."""
        ...

    def lipschitz(self, x: Bound) -> float:
        """max ‖∂f/∂x‖, the operator norm of the Jacobian, over ‖x‖ ≤ x.norm."""
        ...

    def gradient_norms(self, x: Bound, cotangent: float) -> Mapping[str, float]:
        """max ‖(∂f/∂θ)ᵀ g‖ over ‖x‖ ≤ x.norm and ‖g‖ ≤ cotangent, for each parameter θ by name."""
        ...


class Parameterless:
    """A 1-Lipschitz layer that has no parameters and maps 0 to 0; the base of most activations."""

    def output_norm(self, x: Bound) -> float:
        return self.lipschitz(x) * x.norm

    def lipschitz(self, x: Bound) -> float:
        return 1.0

    def gradient_norms(self, x: Bound, cotangent: float) -> Mapping[str, float]:
        return {}


# Takes a bound on the norm of the cotangent at a module's output, notes what it means for the
# module's parameters, and gives the bound at its input.
Pullback = Callable[[float], float]


class Walk(Protocol):
    """Sends a bound through a module: the bound that comes out, and the way back."""

    def __call__(self, name: str, x: Bound) -> tuple[Bound, Pullback]: ...


@runtime_checkable
class Composite(Protocol):
    """A module made of others, which says how bounds pass through its children.

    `walk(name, x)` sends `x` through the child of that name. Its forward may call its children, and
    lists and dictionaries of them; their attributes are not there while a program runs.
    """

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]: ...
