"""The algebra of labels: which record an element belongs to.

A label is an int32: 0 is public, i in 1..n is record i, -1 is several records. `combine` joins the
labels of the operands of one element, `reduce_labels` joins labels along dimensions:

    0 | a = a        a | a = a        a | b = -1   for different records a and b        -1 | a = -1

The join is associative and commutative, so the order of operands never matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SEVERAL = -1
_NONE = 1 << 30  # larger than any record: "no record here" while looking for the smallest label


def public_labels(shape: Sequence[int], device: torch.device | None = None) -> Tensor:
    """Labels of a public tensor: zeros that take the memory of one element."""
    return torch.zeros((), dtype=torch.int32, device=device).expand(tuple(shape))


def combine(*labels: Tensor | None) -> Tensor:
    """Join labels element by element, with broadcasting. `None` is skipped."""
    joined: Tensor | None = None
    for label in labels:
        if label is None:
            continue
        if joined is None:
            joined = label
            continue
        same = (label == 0) | (label == joined)
        joined = torch.where(joined == 0, label, torch.where(same, joined, SEVERAL))
    if joined is None:
        return public_labels(())
    return joined


def reduce_labels(
    labels: Tensor, dims: int | Sequence[int] | None = None, keepdim: bool = False
) -> Tensor:
    """Join labels along `dims` (all of them when None). A join of no elements is public."""
    if labels.dim() == 0:
        return labels
    if dims is None:
        dims = range(labels.dim())
    elif isinstance(dims, int):
        dims = (dims,)
    wanted = sorted({dim % labels.dim() for dim in dims})
    shape = [1 if dim in wanted else size for dim, size in enumerate(labels.shape)]
    if labels.numel() == 0:
        joined = public_labels(shape, labels.device)
    else:
        # Elements along an expanded dimension are one and the same.
        for dim in wanted:
            if labels.stride(dim) == 0:
                labels = labels.narrow(dim, 0, 1)
        joined = labels
        rest = [dim for dim in wanted if labels.shape[dim] > 1]
        if rest:
            largest = labels.amax(rest, keepdim=True)
            smallest = torch.where(labels == 0, _NONE, labels).amin(rest, keepdim=True)
            single = torch.where(smallest == largest, largest, SEVERAL)
            joined = torch.where(smallest == _NONE, 0, single).to(torch.int32)
    if keepdim:
        return joined
    return joined.reshape([size for dim, size in enumerate(shape) if dim not in wanted])


def scatter_labels(size: int, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Join `labels` at flat `positions` of an array of `size` elements.

    Returns the joined labels and whether anything was written to each element.
    """
    flat = positions.reshape(-1)
    values = labels.expand(positions.shape).reshape(-1)
    upper = torch.where(values < 0, _NONE, values)
    lower = torch.where(values == 0, _NONE, values)
    largest = torch.zeros(size, dtype=torch.int32, device=flat.device)
    largest = largest.scatter_reduce(0, flat, upper.to(torch.int32), "amax")
    smallest = torch.full((size,), _NONE, dtype=torch.int32, device=flat.device)
    smallest = smallest.scatter_reduce(0, flat, lower.to(torch.int32), "amin")
    single = torch.where(smallest == largest, largest, SEVERAL)
    joined = torch.where((smallest == _NONE) & (largest == 0), 0, single).to(torch.int32)
    touched = torch.zeros(size, dtype=torch.bool, device=flat.device)
    touched[flat] = True
    return joined, touched


@dataclass(frozen=True, eq=False)
class Layout:
    """How the records lie in a tensor.

    kind:
        "public": no element belongs to a record.
        "mixed": some element belongs to several records.
        "blocks": dimension `dim` is (outer, num_records, inner), and every element is public or
            belongs to the record of its middle index.
        "rows": every slice along `dim` belongs to one record; `ids` holds that record for each
            slice, counted from 0, and -1 for a public slice.
        "scattered": every element belongs to at most one record, in no regular order; `ids` holds
            the record of each element, counted from 0, and -1 for a public one.
    """

    kind: str
    dim: int = 0
    outer: int = 1
    inner: int = 1
    ids: Tensor | None = None


def layout(labels: Tensor, num_records: int) -> Layout:
    """Find how records lie in a tensor with these labels.

    The labels decide, not the sizes: a sequence as long as the batch is not mistaken for it. Where
    several blocks fit, a whole dimension wins, then `outer == 1`, then the smallest dimension.
    """
    if labels.numel() == 0:
        return Layout("public")
    low, high = (int(bound) for bound in torch.aminmax(labels))
    if low < 0:
        return Layout("mixed")
    if high == 0:
        return Layout("public")
    if labels.dim() == 0:
        return Layout("scattered", ids=labels.long() - 1)
    if num_records == 1:
        return Layout("blocks", dim=0, outer=1, inner=labels.shape[0])
    records = torch.arange(1, num_records + 1, dtype=labels.dtype, device=labels.device)
    per_dim = [
        reduce_labels(labels, [k for k in range(labels.dim()) if k != dim])
        for dim in range(labels.dim())
    ]
    for dim, outer, inner in _block_candidates(labels.shape, num_records):
        slices = per_dim[dim].reshape(outer, num_records, inner)
        if bool(((slices == 0) | (slices == records[:, None])).all()):
            return Layout("blocks", dim=dim, outer=outer, inner=inner)
    for dim, slices in enumerate(per_dim):
        if bool((slices >= 0).all()):
            return Layout("rows", dim=dim, ids=slices.long() - 1)
    return Layout("scattered", ids=labels.long() - 1)


def _block_candidates(shape: Sequence[int], num_records: int) -> list[tuple[int, int, int]]:
    candidates = []
    for dim, size in enumerate(shape):
        if size % num_records:
            continue
        rest = size // num_records
        for outer in range(1, rest + 1):
            if rest % outer == 0:
                candidates.append((dim, outer, rest // outer))
    return sorted(candidates, key=lambda c: (c[1] * c[2] != 1, c[1] != 1, c[0], c[1]))


def overlaps(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may share memory (expanded or overlapping windows)."""
    extent = 0
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride <= extent:
            return True
        extent += stride * (size - 1)
    return False


def fit_labels(labels: Tensor, shape: Sequence[int]) -> Tensor:
    """Join the dimensions in which `labels` is larger than `shape`, then expand to `shape`.

    Both are aligned at their last dimension, as in broadcasting.
    """
    extra = labels.dim() - len(shape)
    if extra > 0:
        labels = reduce_labels(labels, range(extra))
    offset = len(shape) - labels.dim()
    dims = [k for k, size in enumerate(labels.shape) if size != shape[k + offset]]
    if dims:
        labels = reduce_labels(labels, dims, keepdim=True)
    return labels.expand(tuple(shape))


def count(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)
