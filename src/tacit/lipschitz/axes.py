"""A record's own axes. Axis 0 is the batch, as in PyTorch, and belongs to nobody."""

from __future__ import annotations

from collections.abc import Iterable

from tacit.lipschitz.refused import Refused


def own_axis(axis: int, rank: int, what: str) -> int:
    """`axis` of a tensor of `rank` axes, counted from the front; never the batch's."""
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
    """Each of `axes`, counted from the front; no axis twice."""
    found = tuple(own_axis(axis, rank, what) for axis in axes)
    if len(set(found)) != len(found):
        raise Refused(f"{what} over axes {tuple(axes)}: an axis is named twice")
    return found
