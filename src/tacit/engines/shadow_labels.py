"""Labels, and the memory that holds them: which record each element of each tensor belongs to.

A label is an int32: 0 is public, i in 1..n is record i, -1 is several records. `combine` joins the
labels of the operands of one element, `reduce_labels` joins labels along dimensions:

    0 | a = a        a | a = a        a | b = -1   for different records a and b        -1 | a = -1

The join is associative and commutative, so the order of operands never matters.

A tensor's labels are its own sizes, strides and offset over the labels of its storage. So a view
has the right labels without a rule, and a write through one view is seen through all others. Most
tensors have one label for each row of many elements, so a storage keeps one label for every `chunk`
bytes, and labels are expanded tensors wherever they repeat: work on them is small.

Storages are known by identity. A storage that died cannot be confused with a new one: `LabelMemory`
holds a weak reference to each storage that it knows, and PyTorch does not reuse the handle of a
storage while a weak reference to it exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tacit.checks.isolation import Event
from tacit.torch_internals import is_traceable_wrapper_subclass, memory_of, weak_memory

SEVERAL = -1
_NONE = 1 << 30  # larger than any record: "no record here" while looking for the smallest label


# --- the algebra ------------------------------------------------------------------------------


def public_labels(shape: Sequence[int], device: torch.device | None = None) -> Tensor:
    """Labels of a public tensor: zeros that take the memory of one element."""
    return torch.zeros((), dtype=torch.int32, device=device).expand(tuple(shape))


def distinct(labels: Tensor, keep: Iterable[int] = ()) -> Tensor:
    """Labels without repetitions: an expanded dimension, unless it is in `keep`, gets size 1."""
    strides = labels.stride()
    if 0 not in strides:
        return labels
    keep = set(keep)
    sizes = [
        min(1, size) if stride == 0 and dim not in keep else size
        for dim, (size, stride) in enumerate(zip(labels.shape, strides, strict=True))
    ]
    return labels.as_strided(sizes, strides)


def compact(labels: Tensor) -> Tensor:
    """The same labels, expanded along the last dimensions if they do not depend on them."""
    small = distinct(labels)
    for dim in range(labels.dim() if small.numel() > 1024 else 0):
        rows = small.flatten(dim)
        if bool((rows == rows[..., :1]).all()):
            rows = rows[..., 0].reshape(*small.shape[:dim], *[1] * (labels.dim() - dim))
            return rows.expand(labels.shape)
    return labels


def has_several(labels: Tensor | None) -> bool:
    return labels is not None and bool((distinct(labels) < 0).any())


def is_private(labels: Tensor | None) -> bool:
    return labels is not None and bool((distinct(labels) != 0).any())


def bounds(found: Iterable[Tensor | None]) -> tuple[int, int]:
    """The smallest and largest of some labels, or 0."""
    given = [labels for labels in found if labels is not None and labels.numel()]
    pairs = [torch.aminmax(distinct(labels)) for labels in given]
    return min((int(x) for x, _ in pairs), default=0), max((int(x) for _, x in pairs), default=0)


def combine(*labels: Tensor | None) -> Tensor:
    """Join labels element by element, with broadcasting. `None` is skipped."""
    given = [label for label in labels if label is not None]
    if len(given) < 2:
        return given[0] if given else public_labels(())
    joined = distinct(given[0])
    for label in map(distinct, given[1:]):
        same = (label == 0) | (label == joined)
        joined = torch.where(joined == 0, label, torch.where(same, joined, SEVERAL))
    shapes = {label.shape for label in given}
    return joined.expand(shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes))


def reduce_labels(
    labels: Tensor, dims: int | Iterable[int] | None = None, keepdim: bool = False
) -> Tensor:
    """Join labels along `dims` (all of them when None). A join of no elements is public."""
    if labels.dim() == 0:
        return labels
    dims = range(labels.dim()) if dims is None else (dims,) if isinstance(dims, int) else dims
    wanted = {dim % labels.dim() for dim in dims}
    shape = [1 if dim in wanted else size for dim, size in enumerate(labels.shape)]
    if labels.numel() == 0:
        joined = public_labels(shape, labels.device)
    else:
        joined = distinct(labels)
        rest = [dim for dim in wanted if joined.shape[dim] > 1]
        if rest:
            largest = joined.amax(rest, keepdim=True)
            smallest = torch.where(joined == 0, _NONE, joined).amin(rest, keepdim=True)
            single = torch.where(smallest == largest, largest, SEVERAL)
            joined = torch.where(smallest == _NONE, 0, single).to(torch.int32)
        joined = joined.expand(shape)
    if keepdim:
        return joined
    return joined.reshape([size for dim, size in enumerate(shape) if dim not in wanted])


def scatter_labels(size: int, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Join `labels` at flat `positions` of an array of `size` elements.

    Returns the joined labels and whether anything was written to each element.
    """
    flat, values = positions.reshape(-1), labels.expand(positions.shape).reshape(-1)
    largest = values.new_zeros(size).scatter_reduce(0, flat, values, "amax")
    lower = torch.where(values == 0, _NONE, values)
    smallest = values.new_full((size,), _NONE).scatter_reduce(0, flat, lower, "amin")
    single = torch.where(smallest == largest, largest, SEVERAL)
    touched = torch.zeros(size, dtype=torch.bool, device=flat.device)
    touched[flat] = True
    return torch.where(smallest == _NONE, 0, single).to(torch.int32), touched


# --- how records lie in a tensor --------------------------------------------------------------


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
    low, high = (int(bound) for bound in torch.aminmax(distinct(labels)))
    if low < 0:
        return Layout("mixed")
    if high == 0:
        return Layout("public")
    if labels.dim() == 0:
        return Layout("scattered", ids=labels.long() - 1)
    if num_records == 1:
        return Layout("blocks", dim=0, outer=1, inner=labels.shape[0])
    labels = compact(labels)
    records = torch.arange(1, num_records + 1, dtype=labels.dtype, device=labels.device)

    @cache
    def slices(dim: int) -> Tensor:
        return reduce_labels(labels, [k for k in range(labels.dim()) if k != dim])

    for dim, outer, inner in _block_candidates(labels.shape, num_records):
        blocks = slices(dim).reshape(outer, num_records, inner)
        if bool(((blocks == 0) | (blocks == records[:, None])).all()):
            return Layout("blocks", dim=dim, outer=outer, inner=inner)
    for dim in range(labels.dim()):
        if bool((slices(dim) >= 0).all()):
            return Layout("rows", dim=dim, ids=slices(dim).long() - 1)
    return Layout("scattered", ids=labels.long() - 1)


def _block_candidates(shape: Sequence[int], num_records: int) -> list[tuple[int, int, int]]:
    rests = [(dim, n // num_records) for dim, n in enumerate(shape) if n % num_records == 0]
    candidates = [
        (dim, outer, rest // outer)
        for dim, rest in rests
        for outer in range(1, rest + 1)
        if rest % outer == 0
    ]
    return sorted(candidates, key=lambda c: (c[1] * c[2] != 1, c[1] != 1, c[0], c[1]))


# --- memory -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Block:
    """The labels of one storage, one per `chunk` bytes, and what first made it private."""

    storage: Any  # a weak reference
    chunk: int
    labels: Tensor
    origin: Event | None

    def view(self, tensor: Tensor, writable: bool = False) -> Tensor:
        """The labels of a tensor. One that may be written to has one label for each element."""
        item, offset = tensor.itemsize, int(tensor.storage_offset()) * tensor.itemsize
        strides = [stride * item for stride in tensor.stride()]
        steps = [pair for pair in zip(strides, tensor.shape, strict=True) if pair[1] > 1]
        chunk = item
        if not writable and self.chunk % item == 0:
            chunk = _largest_chunk(self.chunk, item, offset, steps)
        self._resize(chunk, tensor.untyped_storage().nbytes())
        strides = [0 if stride % chunk else stride // chunk for stride in strides]
        return self.labels.as_strided(tensor.shape, strides, offset // chunk)

    def _resize(self, chunk: int, num_bytes: int) -> None:
        """Keep one label per `chunk` bytes, for at least `num_bytes` bytes.

        Smaller chunks inherit the label of the larger one; a larger one joins the smaller.
        """
        size = -(-num_bytes // chunk)
        if chunk == self.chunk and self.labels.numel() >= size:
            return
        # Labels outlive a block of inference mode, and are written to after it.
        with torch.inference_mode(False):
            common = math.gcd(chunk, self.chunk)
            labels = self.labels.repeat_interleave(self.chunk // common)
            ratio = chunk // common
            if ratio > 1:
                labels = torch.nn.functional.pad(labels, (0, -labels.numel() % ratio))
                labels = reduce_labels(labels.view(-1, ratio), 1)
            missing = max(0, size - labels.numel())
            self.labels = torch.nn.functional.pad(labels, (0, missing)).contiguous()
        self.chunk = chunk

    def replace(self, tensor: Tensor, labels: Tensor) -> None:
        """Set all labels of the storage, which `tensor` covers, in as large chunks as possible."""
        order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        labels = compact(labels.permute(order))
        chunk = tensor.itemsize
        while labels.dim() and (labels.shape[-1] == 1 or labels.stride(-1) == 0):
            chunk *= labels.shape[-1]
            labels = labels.select(-1, 0)
        with torch.inference_mode(False):
            self.labels = labels.reshape(-1).clone()
        self.chunk = chunk


class LabelMemory:
    """The labels of all private storages. A storage without labels is public."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._sweep_at = 256

    def __len__(self) -> int:
        """The number of storages with labels, some of which may have died since."""
        return len(self._blocks)

    def known(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage may hold something private. Cheap: no label is read."""
        return _handle(tensor) in self._blocks

    def find(self, tensor: Tensor) -> Tensor | None:
        """The labels of a tensor, only to be read, or None when its storage is public."""
        block = self._blocks.get(_handle(tensor))
        return None if block is None else block.view(tensor)

    def open(self, tensor: Tensor, origin: Event | None = None) -> Tensor:
        """The labels of a tensor, as a view that may be written to."""
        return self._block(tensor, origin).view(tensor, writable=True)

    def write(self, tensor: Tensor, labels: Tensor | int, origin: Event | None = None) -> None:
        """Set the labels of a tensor, broadcasting them to its shape."""
        if isinstance(labels, int):
            if labels == 0 and not self.known(tensor):
                return
            labels = torch.full((), labels, dtype=torch.int32)
        labels = labels.to(tensor.device).expand(tensor.shape)
        block = self._block(tensor, origin)
        if _overlaps(tensor):
            # Several elements share memory, and which of them is written last is not defined.
            shadow = block.view(tensor, writable=True)
            joined = combine(reduce_labels(shadow), reduce_labels(labels))
            distinct(shadow).fill_(int(joined))
        elif tensor.numel() and tensor.nbytes == tensor.untyped_storage().nbytes():
            block.replace(tensor, labels)
        else:
            block.view(tensor, writable=True).copy_(labels)

    def origin(self, tensor: Tensor) -> Event | None:
        block = self._blocks.get(_handle(tensor))
        return None if block is None else block.origin

    def _block(self, tensor: Tensor, origin: Event | None) -> _Block:
        handle = _handle(tensor)
        block = self._blocks.get(handle)
        if block is None:
            storage = tensor.untyped_storage()
            with torch.inference_mode(False):
                labels = torch.zeros(1, dtype=torch.int32, device=tensor.device)
            chunk = max(storage.nbytes(), tensor.itemsize)
            block = _Block(weak_memory(tensor), chunk, labels, origin)
            self._blocks[handle] = block
            if len(self._blocks) >= self._sweep_at:
                alive = ((h, b) for h, b in self._blocks.items() if not b.storage.expired())
                self._blocks = dict(alive)
                self._sweep_at = max(256, 2 * len(self._blocks))
        elif block.origin is None:
            block.origin = origin
        return block


def _largest_chunk(chunk: int, item: int, offset: int, steps: list[tuple[int, int]]) -> int:
    """The largest divisor of `chunk` with which a view needs no label but those at its strides.

    A dimension either steps over whole chunks, or all its elements lie in the chunk that it starts
    in. `steps` are the strides, in bytes, and sizes of the view's dimensions; `item` divides all.
    """
    while True:
        inside = [(stride, size) for stride, size in steps if stride % chunk]
        extent = sum(stride * (size - 1) for stride, size in inside)
        if offset % chunk + extent + item <= chunk:
            return chunk
        chunk = math.gcd(chunk, max(inside)[0])


def _overlaps(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may share memory (expanded or overlapping windows)."""
    extent = 0
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride <= extent:
            return True
        extent += stride * (size - 1)
    return False


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor holds its values in other tensors: jagged, masked or quantised ones."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def has_elements(tensor: Tensor) -> bool:
    """Whether each element has a place in the tensor's own memory."""
    return tensor.layout is torch.strided and not tensor.is_nested and not is_wrapper(tensor)


def parts(tensor: Tensor) -> list[Tensor] | None:
    """The tensors that a wrapper is made of; None if it does not tell."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def _handle(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise NotImplementedError(f"no label for each element of {tensor.layout} memory")
    return memory_of(tensor)
