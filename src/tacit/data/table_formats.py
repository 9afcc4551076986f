"""Read a table of numbers: `.csv`, `.parquet`, `.npz` or a frame, with one label per record.

`read_table` chooses the reader by the file's suffix. Tables with categories, dates or missing cells
need a schema and are read by `table_schema`. Nothing is scaled, split or encoded here, and what
cannot be read is refused with its place: the line, the column and a remedy.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tacit.data.table_cells import (
    decimal_comma,
    no_column,
    number_of,
    read_cells,
    read_parquet,
    text_rows,
)
from tacit.errors import DataError

_INPUT_NAMES = ("X", "inputs")  # of the arrays in an .npz file


@dataclass(frozen=True)
class Table:
    """`features` (n, ...) float32, all finite; `labels` (n,) as they stand in the file.

    `columns` names the features; it is empty for arrays, whose features have no names.
    """

    path: Path
    features: np.ndarray
    labels: np.ndarray
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.features):
            raise DataError(f"{self.path} has no records; give a file with at least one")
        if len(self.features) != len(self.labels):
            raise DataError(
                f"{self.path} has {len(self.features)} inputs and {len(self.labels)} targets; "
                "give one target per record"
            )
        if self.features[0].size == 0:
            raise DataError(f"{self.path} has a target and no feature; give at least one feature")

    def like(self, train: Table) -> Table:
        """This table with the features of another one, in its order."""
        missing = [name for name in train.columns if name not in self.columns]
        extra = [name for name in self.columns if name not in train.columns]
        if missing or extra:
            raise DataError(
                f"{self.path} does not have the training file's columns: "
                f"missing {missing or 'none'}, unknown {extra or 'none'}"
            )
        features = self.features
        if self.columns != train.columns:
            features = features[:, [self.columns.index(name) for name in train.columns]]
        if features.shape[1:] != train.features.shape[1:]:
            raise DataError(
                f"records of {self.path} have shape {features.shape[1:]} and those of "
                f"{train.path} have {train.features.shape[1:]}; give the same features"
            )
        return Table(self.path, features, self.labels, train.columns)


def read_table(table: Any, target: str) -> Table:
    """The table in a file or a frame, whose `target` column or array holds the labels."""
    if not isinstance(table, str | os.PathLike):
        return _read_frame(table, target)
    path = Path(table)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} ends in {path.suffix or 'no suffix'}; give a file that ends in "
            f"{', '.join(_READERS)}"
        )
    if not path.is_file():
        raise DataError(f"there is no file {path}; check the path")
    return reader(path, target)


def _read_csv(path: Path, target: str) -> Table:
    """Every column but the target must be numeric, and no cell may be empty."""
    rows = text_rows(path)
    _, header = next(rows)
    position, features = _find_target(target, tuple(header), path)
    values, labels, lines = array("d"), [], array("q")
    for line, cells in rows:
        row = list(cells)
        label = row.pop(position).strip()
        if not label:
            raise _empty_cell(f"line {line} of {path}", target)
        labels.append(label)
        lines.append(line)
        for name, cell in zip(features, row, strict=True):
            try:
                values.append(number_of(cell))
            except ValueError:
                if not cell.strip():
                    raise _empty_cell(f"line {line} of {path}", name) from None
                found = f"line {line} has {cell!r}{decimal_comma(cell)}"
                raise _not_numeric(f"column {name!r}", path, found) from None
    table = np.frombuffer(values, np.float64) if values else np.empty(0)
    table = table.reshape(len(labels), len(features))
    names = [f"column {name!r}" for name in features]
    return Table(path, _as_float32(table, path, names, lines), np.array(labels, str), features)


def _read_parquet(path: Path, target: str) -> Table:
    """Every column but the target must be numeric or boolean, without nulls."""
    table = read_parquet(path)
    _, features = _find_target(target, tuple(table.column_names), path)
    for name in table.column_names:
        column = table.column(name)
        if column.null_count:
            row = column.is_null().to_pylist().index(True) + 1
            raise _empty_cell(f"row {row} of {path}", name)
    values = np.empty((table.num_rows, len(features)), np.float32)
    for i, name in enumerate(features):
        column, where = table.column(name), f"column {name!r}"
        if not _is_number(column.type):
            raise _not_numeric(where, path, f"it has type {column.type}")
        values[:, i] = _as_float32(column.to_numpy(), path, where)
    return Table(path, values, _labels(table.column(target), target, path), features)


def _read_frame(frame: Any, target: str) -> Table:
    """Every column but the target must be numeric or boolean, and no cell may be missing."""
    table = read_cells(frame)
    path = Path(table.source)
    _, features = _find_target(target, tuple(table.columns), path)
    for cells in table.columns.values():
        if cells.missing.any():
            raise _empty_cell(cells.place(int(cells.missing.argmax())), cells.name)
    values = np.empty((table.num_rows, len(features)), np.float32)
    for i, name in enumerate(features):
        given, where = table.columns[name].values, f"column {name!r}"
        if given.dtype.kind not in "bf":
            kind = "dates" if given.dtype.kind == "M" else "text"
            raise _not_numeric(where, path, f"it holds {kind}")
        values[:, i] = _as_float32(given, path, where)
    labels = table.columns[target].values
    return Table(path, values, labels.astype(str) if labels.dtype == object else labels, features)


def _labels(column: Any, name: str, path: Path) -> np.ndarray:
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if _is_number(kind):
        return np.asarray(column.to_pylist())
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return np.array(column.to_pylist(), dtype=str)
    raise DataError(f"the target {name!r} of {path} has type {kind}; give whole numbers or strings")


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _read_npz(path: Path, target: str) -> Table:
    """`target` names the targets; the inputs are named X or inputs, or are the only other array."""
    with _open_npz(path) as archive:
        labels = _array_in(archive, path, target)
        others = [name for name in archive.files if name != target]
        input_names = [name for name in _INPUT_NAMES if name in others] or others
        if len(input_names) != 1:
            raise DataError(
                f"{path} has the arrays {', '.join(archive.files)}; name the inputs X or inputs, "
                f"so that they can be told from {target!r} and the others"
            )
        inputs, where = _array_in(archive, path, input_names[0]), f"array {input_names[0]!r}"
    for name, found in ((where, inputs), (f"array {target!r}", labels)):
        if not isinstance(found, np.ndarray):  # a member of the archive that is no .npy file
            raise DataError(f"{name} of {path} is no array; write the file with numpy.savez")
    if inputs.ndim < 2:
        raise DataError(
            f"{where} of {path} has shape {inputs.shape}; give one row per record, "
            "as (n, d) or as images (n, channels, height, width)"
        )
    if labels.ndim != 1:
        raise DataError(f"array {target!r} of {path} has shape {labels.shape}; expected (n,)")
    if inputs.dtype.kind not in "biuf":
        raise _not_numeric(where, path, f"it has type {inputs.dtype}")
    if labels.dtype.kind == "S":
        try:
            labels = np.char.decode(labels, "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"array {target!r} of {path} is not text in UTF-8 ({error.reason}); save numbers "
                "or strings instead"
            ) from error
    return Table(path, _as_float32(inputs, path, where), labels)


def read_arrays(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """The named arrays of an `.npz` file, in that order. Pickled arrays, which run code, are
    refused."""
    with _open_npz(path) as archive:
        return [_array_in(archive, path, name) for name in names]


def _open_npz(path: Path) -> np.lib.npyio.NpzFile:
    try:
        archive = np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}; check the path") from error
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} is truncated or is not an .npz archive ({error}); "
            "write it with numpy.savez or numpy.savez_compressed"
        ) from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{path} holds a single array, not an .npz archive; use numpy.savez")
    return archive


def _array_in(archive: np.lib.npyio.NpzFile, path: Path, name: str) -> np.ndarray:
    if name not in archive.files:
        raise DataError(
            f"{path} has no array {name!r}; it has {', '.join(archive.files) or 'none'}"
        )
    try:
        return archive[name]
    except ValueError as error:
        if "pickle" in str(error).lower():
            raise DataError(
                f"array {name!r} of {path} holds Python objects, and reading them could run code; "
                "save numbers or strings of a fixed width instead"
            ) from error
        raise DataError(f"array {name!r} of {path} cannot be read: {error}") from error
    except (EOFError, OSError, zlib.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise DataError(f"array {name!r} of {path} is damaged ({error})") from error


_READERS: dict[str, Callable[[Path, str], Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".npz": _read_npz,
}


def _find_target(target: str, columns: tuple[str, ...], path: Path) -> tuple[int, tuple[str, ...]]:
    """Where the target column stands, and the other columns."""
    doubled = sorted({name for name in columns if columns.count(name) > 1})
    if doubled:
        raise DataError(f"{path} has more than one column named {doubled[0]!r}; rename one")
    if target not in columns:
        raise no_column(path, target, columns)
    position = columns.index(target)
    return position, columns[:position] + columns[position + 1 :]


def _as_float32(
    values: np.ndarray, path: Path, where: str | list[str], lines: Sequence[int] | None = None
) -> np.ndarray:
    """`values` as float32, refusing NaN, infinity and what float32 cannot hold.

    `where` names the whole array or each of its columns, `lines` the line of each row in the file.
    """
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(values, np.float32)
    bad = np.argwhere(~np.isfinite(converted))
    if len(bad):
        position = tuple(int(i) for i in bad[0])
        row, value = position[0], float(values[position])
        place = f"row {row + 1}" if lines is None else f"line {lines[row]}"
        where = where if isinstance(where, str) else where[position[1]]
        why = "does not fit in float32" if math.isfinite(value) else "is not finite"
        raise DataError(
            f"{place} of {path} has {value:g} in {where}, which {why}; fill it in or drop the "
            "record"
        )
    return converted


def _empty_cell(place: str, column: str) -> DataError:
    return DataError(
        f"{place} has an empty cell in column {column!r}; fill it in or drop the record"
    )


def _not_numeric(where: str, path: Path, found: str) -> DataError:
    return DataError(
        f"{where} of {path} is not numeric: {found}; say in a schema what it is (tacit data "
        "describe makes one), encode it as numbers, or drop it"
    )
