"""Records that are read when they are needed: from memory-mapped arrays, datasets and files.

A `Column` is a tensor of records without values: its shape and type are known, and its rows are
read from a source. It stands wherever a tensor of records stands. Columns of one source are read
together, so an item of a dataset is fetched once for its inputs and its targets.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tacit.errors import DataError
from tacit.pytrees import Tree, map_tensors, named_leaves, take_rows, tensors_of

T = TypeVar("T")
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


@dataclass(frozen=True)
class Reading:
    """How rows are read ahead: by how many processes, how many batches, how long at most."""

    num_workers: int = 0
    prefetch: int = 2
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in ("num_workers", "prefetch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} is {value!r}; give a whole number, 0 or more")
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout!r}; give a number of seconds above 0")


# ---- sources -------------------------------------------------------------------------------------

_AT_ONCE = 1 << 28  # bytes of a mapped file that may stay resident
_AROUND = 1 << 16  # bytes that the kernel maps around a page that is read


class ArrayRows:
    """The rows of one array or tensor, in memory or mapped from a file."""

    def __init__(self, array: np.ndarray | Tensor) -> None:
        self._rows: Any = array if isinstance(array, Tensor) else np.asarray(array)
        self._mapping = _read_only_mapping(array)
        self._resident = 0
        # Where the rows are, so that two arrays over one file or memory are known as such.
        self.place, self._first = _place(array)

    def __len__(self) -> int:
        return len(self._rows)

    def read_rows(self, rows: Tensor) -> Tensor:
        if isinstance(self._rows, Tensor):
            return self._rows.index_select(0, rows.to(self._rows.device))
        taken = np.take(self._rows, rows.numpy(), axis=0)
        if not taken.dtype.isnative:
            taken = taken.astype(taken.dtype.newbyteorder("="))
        if self._mapping is not None:
            self._resident += taken.nbytes + _AROUND * len(rows)
            if self._resident > _AT_ONCE:  # the pages stay in the system's cache
                self._mapping.madvise(mmap.MADV_DONTNEED)
                self._resident = 0
        return torch.from_numpy(taken)

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
    base = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    return os.path.realpath(array.filename), begin + address - base


def _read_only_mapping(array: object) -> mmap.mmap | None:
    """The mapping of a file that was opened for reading, so that its pages can be let go."""
    if not isinstance(array, np.memmap) or array.mode != "r" or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    return _mapping_of(array)


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


# ---- columns -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LazyRows:
    """Some rows of a source, all of them if `rows` is None. Its columns are read together."""

    source: Any
    reading: Reading = field(default_factory=Reading)
    rows: Tensor | None = None
    template: tuple[tuple[torch.Size, torch.dtype], ...] = ()

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    def select(self, rows: Tensor | slice) -> LazyRows:
        every = torch.arange(len(self.source)) if self.rows is None else self.rows
        return replace(self, rows=every[rows.cpu() if isinstance(rows, Tensor) else rows])

    def read(self, rows: Tensor, key: bytes | None = None) -> list[Tensor]:
        """All columns at these rows, on the CPU as a rule; DataError if they are not as before."""
        if len(rows) == 0:
            return [torch.empty((0, *shape), dtype=dtype) for shape, dtype in self.template]
        numbers = rows if self.rows is None else self.rows[rows]
        if isinstance(self.source, DatasetRows):
            found = tensors_of(self.source.read_rows(numbers, key))
        else:
            found = tensors_of(self.source.read_rows(numbers))
        kinds = tuple((t.shape[1:], t.dtype) for t in found)
        if kinds != self.template or any(len(t) != len(rows) for t in found):
            shapes = ", ".join(str(tuple(t.shape)) for t in found)
            wanted = ", ".join(str((len(rows), *shape)) for shape, _ in self.template)
            name = type(getattr(self.source, "wrapped", self.source)).__name__
            raise DataError(
                f"{name} gave tensors of shapes {shapes} for {len(rows)} rows, and {wanted} in the "
                "types of the first row were wanted; give every row the same shapes and types "
                f"({PRIVATE_ROW})"
            )
        return found


def lazy_columns(source: RowSource, reading: Reading, example: Tree | None = None) -> Tree:
    """The tree that the source reads, with columns in the place of its tensors."""
    if example is None:
        example = source.read_rows(torch.zeros(1, dtype=torch.int64))
    kinds = tuple((t.shape[1:], t.dtype) for t in tensors_of(example))
    rows = LazyRows(source, reading, template=kinds)
    places = iter(range(len(kinds)))
    return map_tensors(lambda _: Column(rows, next(places)), example)


def as_column(rows: np.ndarray | Tensor, reading: Reading) -> Column:
    """A column of the rows of an array or a tensor; of a column, the same with this reading."""
    if isinstance(rows, Column):
        return rows.of(replace(rows.lazy, reading=reading))
    column: Column = lazy_columns(ArrayRows(rows), reading)
    return column


_CPU = torch.device("cpu")


class Column(Tensor):
    """A tensor of lazily read records: it has a shape, a type and a device, and no values.

    `column[rows]` reads rows. Whatever else would need values raises DataError.
    """

    lazy: LazyRows
    place: int
    delivered_to: torch.device

    @staticmethod
    def __new__(
        cls,
        lazy: LazyRows,
        place: int,
        device: torch.device = _CPU,
        dtype: torch.dtype | None = None,
    ) -> Column:
        shape, own = lazy.template[place]
        empty = torch.empty((len(lazy), *shape), dtype=dtype or own, device="meta")
        column = empty.as_subclass(cls)
        column.lazy, column.place, column.delivered_to = lazy, place, device
        return column

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Column(shape={tuple(self.shape[1:])}, dtype={self.dtype}, read when needed)"

    def __hash__(self) -> int:
        return id(self)

    def of(self, lazy: LazyRows) -> Column:
        """The same column of other rows."""
        return Column(lazy, self.place, self.delivered_to, self.dtype)

    def delivered(self, values: Tensor) -> Tensor:
        """Values of this column in its type, on its device."""
        return values.to(self.delivered_to, self.dtype, non_blocking=values.is_pinned())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _DESCRIPTIONS:
            return super().__torch_function__(func, types, args, kwargs or {})
        known = isinstance(args[0], Column) or func is Tensor.to if args else False
        if not known or func not in _METHODS:
            name = getattr(func, "__name__", str(func))
            raise DataError(  # a TypeError of an operator would be replaced by Python's own
                f"{name} was called on records that are read when they are needed, and whose "
                "values are not in memory; read some rows, records.take(rows).read()"
            )
        return _METHODS[func](*args, **(kwargs or {}))


def _moved(column: Column, *args: Any, **kwargs: Any) -> Column:
    device, dtype = column.delivered_to, column.dtype
    kwargs.pop("non_blocking", None)
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.device | str | int) and not isinstance(value, bool):
            device = torch.device(value)
    return Column(column.lazy, column.place, device, dtype)


def _read_rows(column: Column, rows: Any) -> Tensor:
    if not isinstance(rows, slice | Tensor):
        raise TypeError(
            f"a column of lazily read records is indexed by a slice, a mask or row numbers, not by "
            f"{type(rows).__name__}; read some rows first, records.take(rows).read()"
        )
    some = column.lazy.select(rows)
    return column.delivered(some.read(torch.arange(len(some)))[column.place])


def _zeros(column: Column, size: Any) -> Tensor:
    return torch.zeros(size, dtype=column.dtype, device=column.delivered_to)


def _to(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(values, Column):
        return _moved(values, *args, **kwargs)
    (like,) = (a for a in args if isinstance(a, Column))
    return values.to(like.delivered_to, like.dtype)


_Tensor: Any = Tensor
_PROPERTIES = [
    "shape",
    "dtype",
    "ndim",
    "layout",
    "is_nested",
    "is_sparse",
    "is_meta",
    "requires_grad",
]
_DESCRIPTIONS = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex),
}
_METHODS: dict[Any, Callable[..., Any]] = {
    _Tensor.device.__get__: lambda column: column.delivered_to,
    Tensor.to: _to,
    Tensor.cpu: lambda column: _moved(column, "cpu"),
    Tensor.__getitem__: _read_rows,
    torch.index_select: lambda column, _, rows: _read_rows(column, rows),
    Tensor.index_select: lambda column, _, rows: _read_rows(column, rows),
    Tensor.new_zeros: _zeros,
}


def columns_of(tree: Tree) -> list[Column]:
    """The lazily read tensors of a tree."""
    return [t for t in tensors_of(tree) if isinstance(t, Column)]


def taken(tree: T, rows: Tensor | slice) -> T:
    """Some rows of the tree: of a tensor at once, of a column when they are read."""
    chosen: dict[LazyRows, LazyRows] = {}

    def of(leaf: Tensor) -> Tensor:
        if not isinstance(leaf, Column):
            return take_rows(leaf, rows)
        if leaf.lazy not in chosen:
            chosen[leaf.lazy] = leaf.lazy.select(rows)
        return leaf.of(chosen[leaf.lazy])

    return map_tensors(of, tree)


def share_rows(one: Column, other: Column) -> bool:
    """Whether the two columns read one row of one source, file or memory."""
    a, b = one.lazy.source, other.lazy.source
    if isinstance(a, ArrayRows) and isinstance(b, ArrayRows):
        same = a.place == b.place
        places = (a.positions(_rows_of(one)), b.positions(_rows_of(other))) if same else ()
    else:
        # A dataset may have been wrapped twice.
        same = getattr(a, "wrapped", a) is getattr(b, "wrapped", b)
        places = (_rows_of(one), _rows_of(other)) if same else ()
    return bool(places) and bool(torch.isin(*places).any())


def _rows_of(column: Column) -> Tensor:
    rows = column.lazy.rows
    return torch.arange(len(column)) if rows is None else rows
