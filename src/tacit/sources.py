"""Where rows are read from: memory-mapped arrays, datasets, and sources of a user's own.

A source answers with the rows of the numbers that it is asked for. `tacit.columns` makes tensors of
records out of it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tacit.errors import DataError
from tacit.pytrees import Tree, map_tensors, named_leaves

PRIVATE_ROW = "which rows a step reads is private: keep this message to yourself"


@runtime_checkable
class RowSource(Protocol):
    """Rows that can be read at random. `Records.lazy` makes records of it.

    `read_rows` returns the rows with these numbers, in their order, as `as_records` takes them: a
    pair (inputs, targets), a mapping with "labels", or inputs alone, each tensor or array with a
    row per number. Numbers may come in any order, and more than once. A row must be a function of
    its number alone, never of the other rows. `read_rows` may be called from another thread than
    the one that trains, so it must not draw from the generators of PyTorch, NumPy or Python.

        class Blocks:
            def __len__(self): ...
            def read_rows(self, rows): return {"x": ..., "labels": ...}
    """

    def __len__(self) -> int: ...

    def read_rows(self, rows: Tensor) -> Tree: ...


_AT_ONCE = 1 << 28  # bytes of a mapped file that may stay resident
_AROUND = 1 << 16  # bytes that the kernel maps around a page that is read


class ArrayRows:
    """The rows of one array or tensor, in memory or mapped from a file."""

    def __init__(self, array: np.ndarray | Tensor) -> None:
        self._rows: Any = array if isinstance(array, Tensor) else np.asarray(array)
        self._mapping = _mapping_of(array) if _CAN_ADVISE else None
        self._read_only = isinstance(array, np.memmap) and array.mode == "r"
        self._resident = 0
        # Where the rows are, so that two arrays over one file or memory are known as such.
        self.place, self._first = _place(array)
        if self._mapping is not None:
            # Otherwise the system reads up to megabytes around each row.
            self._mapping.madvise(mmap.MADV_RANDOM)

    def __len__(self) -> int:
        return len(self._rows)

    def read_rows(self, rows: Tensor) -> Tensor:
        if isinstance(self._rows, Tensor):
            return self._rows.index_select(0, rows.to(self._rows.device))
        numbers = rows.numpy()
        if self._mapping is not None and len(rows) > 1 and bool((np.diff(numbers) == 1).all()):
            self._announce(int(numbers[0]), len(rows))
        taken = np.take(self._rows, numbers, axis=0)
        if not taken.dtype.isnative:
            taken = taken.astype(taken.dtype.newbyteorder("="))
        if self._mapping is not None and self._read_only:
            self._resident += taken.nbytes + _AROUND * len(rows)
            if self._resident > _AT_ONCE:  # the pages stay in the system's cache
                self._mapping.madvise(mmap.MADV_DONTNEED)
                self._resident = 0
        return torch.from_numpy(taken)

    def _announce(self, row: int, count: int) -> None:
        """Have the system read rows in a sequence all at once, as evaluation takes them."""
        assert self._mapping is not None
        stride = self._rows.strides[0]
        begin = _offset_in(self._mapping, self._rows) + row * stride
        begin -= begin % mmap.PAGESIZE
        if stride > 0:
            self._mapping.madvise(mmap.MADV_WILLNEED, begin, count * stride)

    def positions(self, rows: Tensor) -> Tensor:
        """Where these rows begin in `place`, in bytes."""
        if isinstance(self._rows, Tensor):
            return self._first + rows * self._rows.stride(0) * self._rows.element_size()
        return self._first + rows * self._rows.strides[0]


def _place(array: np.ndarray | Tensor) -> tuple[str, int]:
    """The file or memory that holds the array, and where in it the first row begins."""
    if isinstance(array, Tensor):
        return str(array.device), array.data_ptr()
    address = array.__array_interface__["data"][0]
    mapping = _mapping_of(array)
    if mapping is None or not isinstance(array, np.memmap) or array.filename is None:
        return "cpu", address
    begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    return os.path.realpath(array.filename), begin + _offset_in(mapping, array)


def _offset_in(mapping: mmap.mmap, array: np.ndarray) -> int:
    base = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    return int(array.__array_interface__["data"][0] - base)


_CAN_ADVISE = hasattr(mmap, "MADV_RANDOM") and hasattr(mmap, "MADV_DONTNEED")


def _mapping_of(array: object) -> mmap.mmap | None:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


class DatasetRows:
    """The items of a map-style dataset, each turned into trees of tensors by `convert`.

    An item's own random draws come from generators that are keyed by its row and the step, and are
    put back afterwards. So they do not depend on who else takes part, nor on which process reads.
    """

    def __init__(self, dataset: Any, convert: Callable[[Any], Tree]) -> None:
        self.wrapped, self.convert = dataset, convert
        self._first: Tree = None

    def __len__(self) -> int:
        return len(self.wrapped)

    def read_rows(self, rows: Tensor, key: bytes | None = None) -> Tree:
        with _draws_by_row(key or secrets.token_bytes(32)) as begin:
            items = [self._item(row, begin) for row in rows.tolist()]
        return map_tensors(lambda *values: torch.stack(values), *items)

    def _item(self, row: int, begin: Callable[[int], None]) -> Tree:
        begin(row)
        try:
            item = self.convert(self.wrapped[row])
        except Exception as error:
            raise DataError(
                f"record {row} cannot be read: {type(error).__name__}: {error} ({PRIVATE_ROW})"
            ) from error
        if self._first is None:
            self._first = item
        _require_alike(item, self._first, row)
        return item


def _require_alike(item: Tree, first: Tree, row: int) -> None:
    """Raise DataError unless the item has the tensors, shapes and types of the first one."""
    found, wanted = _kinds(item), _kinds(first)
    for place in (*wanted, *found):
        mine, other = found.get(place), wanted.get(place)
        if mine == other:
            continue
        if mine is None or other is None:
            remedy = "give every record the same keys"
        elif mine[0] != other[0]:
            remedy = (
                'pad all records to one length, with padding="max_length" of a tokenizer or '
                "torch.nn.utils.rnn.pad_sequence, and pass a mask"
            )
        else:
            remedy = "convert it in the dataset, for example with float(...)"
        raise DataError(
            f"{place} of record {row} is {_described(mine)}, and of the first record "
            f"{_described(other)}; {remedy} ({PRIVATE_ROW})"
        )


_Kind = tuple[tuple[int, ...], torch.dtype]


def _kinds(item: Tree) -> dict[str, _Kind]:
    leaves = (named_leaves(part, name) for part, name in zip(item, _PARTS, strict=True))
    return {
        place: (tuple(t.shape), t.dtype)
        for part in leaves
        for place, t in part
        if isinstance(t, Tensor)
    }


_PARTS = ("inputs", "targets")


def _described(kind: _Kind | None) -> str:
    if kind is None:
        return "missing"
    return f"of shape {kind[0]} and type {str(kind[1]).removeprefix('torch.')}"


@contextmanager
def _draws_by_row(key: bytes) -> Iterator[Callable[[int], None]]:
    """Within it, `begin(row)` keys the generators of PyTorch, NumPy and Python for one row."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    numpy_state: Any = np.random.get_state(legacy=False)

    def begin(row: int) -> None:
        place = row.to_bytes(8, "little")
        words = hashlib.blake2b(place, key=key, digest_size=32, person=b"tacit record").digest()
        torch.default_generator.manual_seed(int.from_bytes(words[:7], "little"))
        own = np.random.Philox(key=np.frombuffer(words[8:24], dtype=np.uint64))
        np.random.set_bit_generator(own)  # type: ignore[attr-defined]
        random.seed(words[24:])

    try:
        yield begin
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_bit_generator(numpy_generator)  # type: ignore[attr-defined]
        if numpy_state["has_gauss"]:
            np.random.set_state(numpy_state)  # exchanging generators drops a kept number
        random.setstate(python_state)
