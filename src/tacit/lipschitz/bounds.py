"""What is known about one record inside a network, and the three answers of a layer.

All norms are L2 over everything that one record has at that point: all channels, all positions.
Axis 0 is the batch, as in PyTorch, and is never one of a record's own axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from tacit.errors import Refused


def own_axis(axis: int, rank: int, what: str) -> int:
    """`axis` of a tensor of `rank` axes, counted from the front. The batch axis is refused."""
    front = axis + rank if axis < 0 else axis
    if front == 0:
        raise Refused(
            f"{what} over axis {axis} of {rank} would mix records: axis 0 is the batch; give one "
            "of a record's own axes, from 1"
        )
    if not 0 < front < rank:
        raise Refused(f"{what} over axis {axis}: a record has the axes 1 to {rank - 1} here")
    return front


def own_axes(axes: Iterable[int], rank: int, what: str) -> tuple[int, ...]:
    """`axes` counted from the front, none of them twice."""
    own = tuple(own_axis(axis, rank, what) for axis in axes)
    if len(set(own)) != len(own):
        raise Refused(f"{what} over axes {tuple(axes)}: an axis is named twice")
    return own


def per_axis(value: int | Iterable[int], dims: int) -> tuple[int, ...]:
    """One number per axis, as PyTorch reads a setting: an int stands for `dims` equal ones."""
    return (value,) * dims if isinstance(value, int) else tuple(value)


def finite_above_zero(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; give a finite number above 0")
    return float(value)


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

    It must treat each record by itself. Check a layer of your own with `audit_layer`.

        class Halve(nn.Module, Parameterless):
            def forward(self, x): return x / 2
            def lipschitz(self, x): return 0.5
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


class Layer(nn.Module, Parameterless):
    """The base of Tacit's own layers, which override the answers that differ.

    `shown` names the settings that its representation shows.
    """

    shown = ""

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.shown.split())


# From a bound on the norm of the cotangent at a module's output to the bound at its input. It also
# records the bounds on the gradients of the module's parameters.
Pullback = Callable[[float], float]


class Walk(Protocol):
    """Sends a bound through a module; returns the bound on its output and the pullback."""

    def __call__(self, name: str, x: Bound) -> tuple[Bound, Pullback]: ...


@runtime_checkable
class Composite(Protocol):
    """A module made of others, which says how bounds pass through its children.

    `walk(name, x)` sends `x` through the child of that name. Its forward may call its children, and
    lists and dictionaries of them, but cannot read their attributes while a program runs.
    """

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]: ...


def clips_cotangents(module: nn.Module) -> bool:
    """Whether a part limits the cotangent, as `ClipGradient` does.

    Without one, a pullback B is linear: B(t·G) = t·B(G). With one it is only increasing: a limit C
    well below G passes half of G as if it were all of it. So where a cotangent is *shared out*
    among branches, all that is known of each branch is B(G).
    """
    limits = (getattr(part, "cotangent_limit", math.inf) for part in module.modules())
    return any(limit < math.inf for limit in limits)
