"""`Records`: a dataset as tensors, with the constants about it that are public.

`as_records` makes them of what users have: pairs, mappings, arrays and map-style datasets. What
does not fit in memory is read row by row when it is needed (`Records.lazy`).
"""

from __future__ import annotations

import numbers
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.columns import Reading, as_column, columns_of, lazy_columns, taken
from tacit.errors import UndeclaredConstant, shown
from tacit.prefetch import HeldRows
from tacit.pytrees import (
    Tree,
    device_of,
    map_tensors,
    named_leaves,
    num_rows,
    require_plain_tensors,
    take_rows,
    tensors_of,
)
from tacit.sources import DatasetRows, RowSource

# Where a mapping holds its targets, by the convention of Hugging Face.
_TARGET_KEYS = ("labels", "label")


@dataclass(frozen=True)
class Records:
    """Inputs and targets, one row per record, and what is public about them.

    `inputs` and `targets` are tensors, or pytrees of them: tuples, lists, mappings and dataclasses,
    each tensor with the records in its first dimension. The model is called as `model(x)`,
    `model(*inputs)` or `model(**inputs)`, and the loss as `loss(outputs, targets)`. Without targets
    the loss gets the empty tuple `()`: for models whose outputs contain all that the loss needs,
    such as an autoencoder that returns its input beside the reconstruction. A language model that
    predicts its own tokens has them as targets.

        Records({"input_ids": ids, "attention_mask": mask}, targets=ids)

    A memory-mapped array stays on disk, and its rows are read when they are needed, as are those of
    `Records.lazy`. `take`, `to` and splits leave them there; `read` brings them into memory.

    `record_ids` name the records independently of who else is in the dataset: a neighbour that
    lacks a record keeps the ids of all the others. `public_size` is a *declared* number of
    records, from which rates and divisors may be derived; `len(records)` is private and is
    never used for either. Ids are below `num_ids`, by default below `public_size`.

    `privacy_unit` says what one record is, such as "user": what ε protects. Reports repeat it.

    `class_names` are the names of classes 0..K-1, or of the labels that a record may have several
    of; `feature_names` those of the entries of one input. Both are public.
    """

    inputs: Tree
    targets: Tree = ()
    num_classes: int | None = None
    public_size: int | None = None
    name: str = "records"
    record_ids: Tensor = field(default=None)  # type: ignore[assignment]
    num_ids: int | None = None
    notes: tuple[str, ...] = ()
    privacy_unit: str = "record"
    class_names: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None
    row_numbered: bool = False  # no ids were given, so they are the rows' numbers
    # Of records without ids of their own: row numbers name records within one origin only.
    origin: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", as_tensors(self.inputs, "inputs"))
        targets = () if self.targets is None else as_tensors(self.targets, "targets")
        object.__setattr__(self, "targets", targets)
        count = num_rows(self.inputs, "inputs")
        if any(True for _ in named_leaves(targets, "")) and count != num_rows(targets, "targets"):
            raise ValueError(
                f"{count} inputs and {num_rows(targets)} targets; give one target per record"
            )
        if self.record_ids is None:
            ids = torch.arange(count, device=self.device)
            object.__setattr__(self, "record_ids", ids)
            object.__setattr__(self, "row_numbered", True)
            object.__setattr__(self, "origin", self.origin or secrets.token_hex(8))
        elif len(self.record_ids) != count:
            raise ValueError(
                f"{count} inputs and {len(self.record_ids)} record ids; give one id per record"
            )
        for name in ("public_size", "num_classes", "num_ids"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _declared(name, value))

    def __repr__(self) -> str:
        """What is public: neither values nor the number of records."""
        return (
            f"Records({self.name!r}, shape={self.shape}, num_classes={self.num_classes}, "
            f"public_size={self.public_size})"
        )

    def __len__(self) -> int:
        return num_rows(self.inputs)

    @property
    def shape(self) -> Any:
        """The shape of one record's input: a tuple, or for a pytree the tree of such tuples."""
        # As a plain dict: a mapping type of tensors need not take shapes.
        tree = dict(self.inputs) if isinstance(self.inputs, Mapping) else self.inputs
        return map_tensors(lambda t: tuple(t.shape[1:]), tree)

    @cached_property
    def device(self) -> torch.device:
        return device_of(self.inputs)

    @staticmethod
    def lazy(
        data: object,
        *,
        num_workers: int = 0,
        prefetch: int = 2,
        timeout: float = 300.0,
        **declared: Any,
    ) -> Records:
        """Records that stay where they are, and are read when a step needs them.

        `data` is a map-style dataset, a `RowSource`, or arrays, as `as_records` takes them. Other
        arguments are those of `Records`: `public_size`, `num_classes`, `record_ids` and so on. All
        rows have the shapes and types of the first one.

        An item of a dataset must be a function of its record alone. A random transform is fine: the
        generators of PyTorch, NumPy and Python are keyed anew for each record and step. A dataset
        that keeps state from one item to the next, or looks at other records, is not: the guarantee
        does not hold for it, and nothing here can notice.

        Args:
            num_workers: processes that read the items of a dataset while a step runs. With 0 they
                are read when they are needed. Arrays and other sources are read by a thread.
            prefetch: how many batches are read ahead, and held in memory beside the present one.
                The batches are the same for every number. With 0 nothing is read ahead.
            timeout: seconds to wait for a batch that is read ahead before the run ends.

        Example:
            >>> images = Records.lazy(ImageFolder("photos", transform), num_workers=2)
        """
        return Records(*_lazily(data, Reading(num_workers, prefetch, timeout)), **declared)

    @property
    def is_lazy(self) -> bool:
        """Whether rows are read when they are needed."""
        return bool(columns_of((self.inputs, self.targets)))

    def read(self) -> Records:
        """The same records with all their values in memory."""
        if not self.is_lazy:
            return self
        held = HeldRows(columns_of((self.inputs, self.targets)))
        everyone = torch.arange(len(self), device=self.device)
        inputs, targets = held.gather((self.inputs, self.targets), everyone)
        return replace(self, inputs=inputs, targets=targets)

    def to(self, device: torch.device | str, floating: torch.dtype | None = None) -> Records:
        """The records on a device; with `floating`, inputs that are real numbers in that type.

        Targets that are real numbers get it too, but at least float32.
        """
        # Real targets are compared with outputs, in 16 bits there would be little left of them.
        of_targets = floating and torch.promote_types(floating, torch.float32)
        return replace(
            self,
            inputs=map_tensors(lambda t: _moved(t, device, floating), self.inputs),
            targets=map_tensors(lambda t: _moved(t, device, of_targets), self.targets),
            record_ids=self.record_ids.to(device),
        )

    def take(self, rows: Tensor | slice) -> Records:
        """Some of the records, with their ids: by a slice, a mask or indices."""
        inputs, targets = taken((self.inputs, self.targets), rows)
        return replace(
            self,
            inputs=inputs,
            targets=targets,
            record_ids=take_rows(self.record_ids, rows),
        )

    def without(self, index: int) -> Records:
        """The neighbour that lacks the record at `index`; everyone else keeps their id."""
        keep = torch.ones(len(self), dtype=torch.bool, device=self.device)
        keep[index] = False
        return self.take(keep)

    def replaced(self, index: int, x: Tree, y: Tree = ()) -> Records:
        """The neighbour whose record at `index` is (x, y) instead, under the same id.

        x and y have the structure of `inputs` and `targets`, without the dimension of records.
        """

        def changed(column: Tensor, value: Tensor | float) -> Tensor:
            column = column.clone()
            column[index] = value
            return column

        return replace(
            self,
            inputs=map_tensors(changed, self.inputs, x),
            targets=map_tensors(changed, self.targets, y),
        )

    def require_public_size(self, wanted_for: str) -> int:
        """The declared size, or an error that says how to declare it."""
        if self.public_size is None:
            raise UndeclaredConstant(
                f"{wanted_for} needs the number of records, which is private for {self.name!r}; "
                "declare it with Records(..., public_size=N), or give both sampling_rate and "
                "expected_batch_size"
            )
        return self.public_size

    def require_num_ids(self, wanted_for: str) -> int:
        """The declared number that all ids are below, or an error that says how to declare it."""
        declared = self.num_ids or self.require_public_size(wanted_for)
        ids = self.record_ids
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < declared:
            raise UndeclaredConstant(
                f"record ids reach {int(ids.max())}, but ids are declared to be below {declared}; "
                "declare Records(..., num_ids=...) so that it covers all ids"
            )
        return declared


def _declared(name: str, value: Any) -> int:
    """A declared number as an int."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < 1:
        raise ValueError(f"{name} is {shown(value)}; declare a positive whole number")
    return int(value)


def _moved(column: Tensor, device: torch.device | str, floating: torch.dtype | None) -> Tensor:
    return column.to(device, floating if column.is_floating_point() else None)


def as_records(data: object) -> Records:
    """`data` as `Records`.

    - `Records`: itself.
    - A pair (inputs, targets) of tensors, arrays or pytrees of them. In a longer tuple, and in a
      `TensorDataset`, the last one is the target and the others are the inputs.
    - A mapping of tensors or arrays, such as a `BatchEncoding`: the inputs, and under "labels" or
      "label" the targets.
    - A map-style dataset (`len(data)` and `data[i]`). Its items are pairs, longer tuples or
      mappings, read in the same way, or inputs alone. All items must have equal shapes. It is read
      into memory once; if it would take more than 1 GiB there, it is read as `Records.lazy` does.
    - A `RowSource`, as `Records.lazy` reads it.
    """
    if isinstance(data, Records):
        return data
    arrays = _arrays_of(data)
    if arrays is not None:
        return Records(*arrays)
    dataset: Any = _random_access(data)
    if isinstance(dataset, RowSource) or _bytes_of(dataset) > _MOST_IN_MEMORY:
        return Records.lazy(dataset)
    items = [_inputs_and_targets(dataset[i]) for i in range(len(dataset))]
    inputs, targets = zip(*items, strict=True)
    return Records(_stacked(inputs, "inputs"), _stacked(targets, "targets"))


_MOST_IN_MEMORY = 1 << 30


def _arrays_of(data: Any) -> tuple[Tree, Tree] | None:
    """Inputs and targets where the data is whole arrays or tensors."""
    if isinstance(data, torch.utils.data.TensorDataset):
        return _inputs_and_targets(data.tensors)
    if isinstance(data, Mapping | tuple) or (isinstance(data, Sequence) and len(data) == 2):
        return _inputs_and_targets(data)
    return None


def _random_access(data: Any) -> Any:
    """The data if any of its items can be asked for; TypeError with the reason if not."""
    if isinstance(data, torch.utils.data.DataLoader):
        raise TypeError(
            "a DataLoader decides itself which records are in a batch, and the guarantee needs "
            "them drawn by a sampler of Tacit's; give its dataset: loader.dataset"
        )
    other = isinstance(data, Sequence | Tensor) or _is_array(data)
    if other or isinstance(data, torch.utils.data.IterableDataset):
        map_style = False
    else:
        map_style = hasattr(data, "__len__") and (
            hasattr(data, "__getitem__") or isinstance(data, RowSource)
        )
    if not map_style and not other and hasattr(data, "__iter__"):
        raise TypeError(
            f"{type(data).__name__} is a stream, and the guarantee needs random access: a step "
            "draws each record with the same probability, wherever it is, and a stream hands out "
            "neighbours in its order. Give a dataset with len(data) and data[i], or write the "
            "stream to an .npy or Parquet file once and open that"
        )
    if not map_style:
        raise TypeError(
            f"cannot read records from {type(data).__name__}; give tacit.Records, a pair (inputs, "
            "targets) of tensors or arrays, a dict of tensors, or a map-style torch dataset"
        )
    if len(data) == 0:
        raise ValueError(
            f"{type(data).__name__} is empty, so that the shapes of its records are unknown; "
            "give tacit.Records"
        )
    return data


def _bytes_of(dataset: Any) -> int:
    """What the dataset would take in memory, if all items are like the first one."""
    return len(dataset) * sum(t.nbytes for t in tensors_of(_item_of(dataset[0])))


def _lazily(data: Any, reading: Reading) -> tuple[Tree, Tree]:
    """Inputs and targets as columns, of which nothing but the first row has been read."""
    if isinstance(data, Records):
        raise TypeError(
            "Records.lazy was given Records, which are read already as they were made to be; give "
            "it the arrays or the dataset that they were made from"
        )
    arrays = (data, ()) if isinstance(data, Tensor) or _is_array(data) else _arrays_of(data)
    if arrays is not None:
        inputs, targets = arrays
        named = (inputs, "inputs"), (() if targets is None else targets, "targets")
        trees = tuple(as_tensors(tree, name) for tree, name in named)
        return map_tensors(lambda t: as_column(t, reading), trees)
    found: Any = _random_access(data)
    given = isinstance(found, RowSource)
    source: Any = _Converted(found) if given else DatasetRows(found, _item_of)
    inputs, targets = lazy_columns(source, reading)
    return inputs, targets


def _item_of(item: Any) -> tuple[Tree, Tree]:
    """One record of a dataset, or rows of a source, as trees of tensors."""
    inputs, targets = _inputs_and_targets(item)
    return _record_tensors(inputs, "inputs"), _record_tensors(targets, "targets")


def _record_tensors(tree: Tree, name: str) -> Tree:
    return as_tensors(_converted(tree, name, numbers_too=True), name)


@dataclass(frozen=True)
class _Converted:
    """A user's source, whose rows may be arrays and come in any of the forms of `as_records`."""

    wrapped: RowSource

    def __len__(self) -> int:
        return len(self.wrapped)

    def read_rows(self, rows: Tensor) -> Tree:
        return _item_of(self.wrapped.read_rows(rows))


def as_tensors(tree: Tree, name: str) -> Tree:
    """The tree with its arrays and its lists of numbers as tensors; TypeError for other leaves."""
    if not isinstance(tree, Tensor):
        tree = _converted(tree, name)
    require_plain_tensors(tree, name)
    for place, leaf in named_leaves(tree, name):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{place} is {leaf!r} ({type(leaf).__name__}), which has no row per record; leave "
                "constants out of the records and have the model pass them on"
            )
    return tree


def _inputs_and_targets(data: Any) -> tuple[Tree, Tree]:
    """A mapping holds its targets by name, a tuple at its end; anything else is inputs alone."""
    if isinstance(data, Mapping):
        keys = [key for key in _TARGET_KEYS if data.get(key) is not None]
        if len(keys) > 1:
            raise ValueError(
                "both 'labels' and 'label' are there; leave the one out that is not the target, or "
                "give Records(inputs, targets)"
            )
        inputs = {key: value for key, value in data.items() if key not in _TARGET_KEYS}
        return inputs, data[keys[0]] if keys else ()
    if not isinstance(data, tuple | list) or (len(data) != 2 and _are_numbers(data)):
        return data, ()
    if len(data) < 2:
        return data[0] if data else (), ()
    return data[0] if len(data) == 2 else tuple(data[:-1]), data[-1]


def _stacked(rows: Sequence[Tree], name: str) -> Tree:
    """Trees of one structure as one tree, in which every tensor has a row for each of them."""
    rows = [_record_tensors(row, name) for row in rows]
    places = [place for place, _ in named_leaves(rows[0], name)]
    for i, row in enumerate(rows):
        if len(tensors_of(row)) != len(places):
            raise ValueError(
                f"{name} of record {i} hold {len(tensors_of(row))} tensors and those of record 0 "
                f"{len(places)}; give every record the same keys"
            )
    place = iter(places)
    return map_tensors(lambda *column: _stacked_tensors(column, next(place)), *rows)


def _stacked_tensors(column: Sequence[Tensor], name: str) -> Tensor:
    shapes = {tuple(value.shape) for value in column}
    if len(shapes) > 1:
        two = " and ".join(str(shape) for shape in sorted(shapes)[:2])
        raise ValueError(f"{name} has records of different shapes, such as {two}; {_PAD}")
    return torch.stack(tuple(column))


_PAD = (
    'pad all records to one length, with padding="max_length" of a tokenizer or '
    "torch.nn.utils.rnn.pad_sequence, and pass a mask"
)


def _converted(tree: Tree, name: str, numbers_too: bool = False) -> Tree:
    """Arrays and lists of numbers as tensors, and single numbers too where they are a record's."""
    if isinstance(tree, Tensor):
        return tree
    if isinstance(tree, str | bytes):
        raise TypeError(
            f"{name} is text; turn it into numbers with a tokenizer or a table of categories"
        )
    if isinstance(tree, numbers.Number | np.generic):
        return torch.as_tensor(tree) if numbers_too else tree
    if _is_array(tree):
        array = np.asarray(tree)
        if array.dtype.kind not in "biufc":
            raise TypeError(
                f"{name} is an array of {array.dtype}; give numbers, and text by a tokenizer or a "
                "table of categories"
            )
        # A record of a mapped array is mapped as well; it is read with the record.
        if isinstance(tree, np.memmap) and array.ndim and len(array) and not numbers_too:
            return as_column(tree, Reading())
        if numbers_too and not array.flags.writeable:
            array = array.copy()
        # Not for a single number, which would get a dimension.
        return torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array)
    if isinstance(tree, tuple | list) and _are_numbers(tree):
        try:
            return torch.as_tensor(tree)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{name} has rows of different lengths or kinds; {_PAD}") from error
    if isinstance(tree, Mapping):
        changed = {k: _converted(v, f"{name}[{k!r}]", numbers_too) for k, v in tree.items()}
        return tree if all(changed[key] is tree[key] for key in changed) else changed
    if type(tree) in (tuple, list):
        return type(tree)(
            _converted(value, f"{name}[{i}]", numbers_too) for i, value in enumerate(tree)
        )
    return tree


def _is_array(value: object) -> bool:
    """NumPy's arrays, tables of pandas, images of Pillow."""
    return hasattr(value, "__array__") or hasattr(value, "__array_interface__")


def _are_numbers(values: Any) -> bool:
    """Whether these are numbers, or sequences of numbers; the first of each level tells."""
    while isinstance(values, tuple | list) and values:
        values = values[0]
    return isinstance(values, numbers.Number | np.generic)
