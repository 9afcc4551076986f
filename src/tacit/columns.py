"""Columns of records whose rows are read when they are needed.

A `LazyColumn` is a tensor of records without values: its shape and type are known, and its rows are
read from a source. It stands wherever a tensor of records stands. Columns of one source are read
together, so an item of a dataset is fetched once for its inputs and its targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tacit.errors import DataError, shown
from tacit.pytrees import Tree, map_tensors, take_rows, tensors_of
from tacit.sources import PRIVATE_ROW, ArrayRows, DatasetRows, RowSource

T = TypeVar("T")


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
                raise ValueError(f"{name} is {shown(value)}; give a whole number, 0 or more")
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise ValueError(f"timeout is {shown(self.timeout)}; give a number of seconds above 0")


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
        example = source.read_rows(torch.zeros(min(1, len(source)), dtype=torch.int64))
    kinds = tuple((t.shape[1:], t.dtype) for t in tensors_of(example))
    rows = LazyRows(source, reading, template=kinds)
    places = iter(range(len(kinds)))
    return map_tensors(lambda _: LazyColumn(rows, next(places)), example)


def as_column(rows: np.ndarray | Tensor, reading: Reading) -> LazyColumn:
    """A column of the rows of an array or a tensor; of a column, the same with this reading."""
    if isinstance(rows, LazyColumn):
        return rows.of(replace(rows.lazy, reading=reading))
    column: LazyColumn = lazy_columns(ArrayRows(rows), reading)
    return column


_CPU = torch.device("cpu")


class LazyColumn(Tensor):
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
    ) -> LazyColumn:
        shape, own = lazy.template[place]
        empty = torch.empty((len(lazy), *shape), dtype=dtype or own, device="meta")
        column = empty.as_subclass(cls)
        column.lazy, column.place, column.delivered_to = lazy, place, device
        return column

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyColumn(shape={tuple(self.shape[1:])}, dtype={self.dtype}, read when needed)"

    def __hash__(self) -> int:
        return id(self)

    def of(self, lazy: LazyRows) -> LazyColumn:
        """The same column of other rows."""
        return LazyColumn(lazy, self.place, self.delivered_to, self.dtype)

    def delivered(self, values: Tensor) -> Tensor:
        """Values of this column in its type, on its device."""
        return values.to(self.delivered_to, self.dtype, non_blocking=values.is_pinned())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _DESCRIPTIONS:
            return super().__torch_function__(func, types, args, kwargs or {})
        known = isinstance(args[0], LazyColumn) or func is Tensor.to if args else False
        if not known or func not in _METHODS:
            name = getattr(func, "__name__", str(func))
            raise DataError(  # a TypeError of an operator would be replaced by Python's own
                f"{name} was called on records that are read when they are needed, and whose "
                "values are not in memory; read some rows, records.take(rows).read()"
            )
        return _METHODS[func](*args, **(kwargs or {}))


def _moved(column: LazyColumn, *args: Any, **kwargs: Any) -> LazyColumn:
    device, dtype = column.delivered_to, column.dtype
    kwargs.pop("non_blocking", None)
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.device | str | int) and not isinstance(value, bool):
            device = torch.device(value)
    return LazyColumn(column.lazy, column.place, device, dtype)


def _read_rows(column: LazyColumn, rows: Any) -> Tensor:
    if not isinstance(rows, slice | Tensor):
        raise TypeError(
            f"a column of lazily read records is indexed by a slice, a mask or row numbers, not by "
            f"{type(rows).__name__}; read some rows first, records.take(rows).read()"
        )
    some = column.lazy.select(rows)
    return column.delivered(some.read(torch.arange(len(some)))[column.place])


def _zeros(column: LazyColumn, size: Any) -> Tensor:
    return torch.zeros(size, dtype=column.dtype, device=column.delivered_to)


def _to(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(values, LazyColumn):
        return _moved(values, *args, **kwargs)
    (like,) = (a for a in args if isinstance(a, LazyColumn))
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


def columns_of(tree: Tree) -> list[LazyColumn]:
    """The lazily read tensors of a tree."""
    return [t for t in tensors_of(tree) if isinstance(t, LazyColumn)]


def taken(tree: T, rows: Tensor | slice) -> T:
    """Some rows of the tree: of a tensor at once, of a column when they are read."""
    chosen: dict[LazyRows, LazyRows] = {}

    def of(leaf: Tensor) -> Tensor:
        if not isinstance(leaf, LazyColumn):
            return take_rows(leaf, rows)
        if leaf.lazy not in chosen:
            chosen[leaf.lazy] = leaf.lazy.select(rows)
        return leaf.of(chosen[leaf.lazy])

    return map_tensors(of, tree)


def share_rows(one: LazyColumn, other: LazyColumn) -> bool:
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


def _rows_of(column: LazyColumn) -> Tensor:
    rows = column.lazy.rows
    return torch.arange(len(column)) if rows is None else rows
