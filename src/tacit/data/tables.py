"""`load_file`: a user's own .csv, .parquet or .npz as two `Records`, train and test.

A user's file after reading: features as numbers, one label a record, nothing scaled or split.

From the labels in a user's file to classes 0..K-1.

Read a user's CSV file: a header row, then numbers, and one target column.

Read a user's Parquet file, with pyarrow when it is there.

Read a user's `.npz` file: one array of inputs, one of targets.

`load_file`: a user's own .csv, .parquet or .npz as two `Records`, train and test.
"""

from __future__ import annotations

import csv
import math
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tacit.data.file_formats import array_names, read_arrays
from tacit.data.scaling import Constants, RangeScaler, Scaler, as_scalers, scaled
from tacit.data.splits import split_by_content
from tacit.errors import DataError, UndeclaredConstant
from tacit.records import Records

if TYPE_CHECKING:
    from _csv import Reader as CsvReader


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
                "give one target a record"
            )
        if self.features[0].size == 0:
            raise DataError(f"{self.path} has a target and no feature; give at least one feature")

    def reordered(self, columns: tuple[str, ...]) -> Table:
        """The same table with its features in the order of another one's."""
        if self.columns == columns:
            return self
        missing = [name for name in columns if name not in self.columns]
        extra = [name for name in self.columns if name not in columns]
        if missing or extra:
            raise DataError(
                f"{self.path} does not have the training file's columns: "
                f"missing {missing or 'none'}, unknown {extra or 'none'}"
            )
        order = [self.columns.index(name) for name in columns]
        return Table(self.path, self.features[:, order], self.labels, columns)


def as_float32(values: np.ndarray, path: Path, where: str, first_row: int = 1) -> np.ndarray:
    """`values` as float32, refusing NaN, infinity, and what float32 cannot hold."""
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"{where} of {path} has type {values.dtype}, not numbers; encode it as numbers, "
            "or drop it"
        )
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(values, np.float32)
    finite = np.isfinite(converted)
    if not finite.all():
        position = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise DataError(
            f"{where} of {path} has {values[position]} in row {position[0] + first_row}; "
            "fill in or drop such records (float32 holds numbers up to 3.4e38)"
        )
    return converted


def require_column(target: str, columns: tuple[str, ...], path: Path) -> int:
    """Where the target column stands."""
    doubled = sorted({name for name in columns if columns.count(name) > 1})
    if doubled:
        raise DataError(f"{path} has more than one column named {doubled[0]!r}; rename one")
    if target not in columns:
        raise DataError(f"{path} has no column {target!r}; its columns are {', '.join(columns)}")
    return columns.index(target)


MAX_CLASSES = 1000
Classes = int | Sequence[object]


def canonical(labels: np.ndarray, origin: str) -> np.ndarray:
    """Labels as whole numbers when all of them are, else as strings. Real numbers are refused."""
    kind = labels.dtype.kind
    if kind == "U":
        distinct = np.unique(labels)
        if any("_" in label for label in distinct):  # float() would read 1_0 as ten
            return labels
        try:
            distinct.astype(np.float64)
        except ValueError:
            return labels
        labels, kind = labels.astype(np.float64), "f"
    if kind == "f":
        bad = np.flatnonzero(~np.isfinite(labels))
        if len(bad):
            raise DataError(
                f"{origin} is {labels[bad[0]]} in record {bad[0] + 1}; drop the records "
                "without a class"
            )
        fractions = np.flatnonzero(labels != np.round(labels))
        if len(fractions):
            raise DataError(
                f"{origin} is a real number ({labels[fractions[0]]:g} in record "
                f"{fractions[0] + 1}); Tacit trains classifiers only: give classes as whole "
                "numbers or strings"
            )
        return labels.astype(np.int64)
    if kind in "biu":
        return labels.astype(np.int64)
    raise DataError(f"{origin} has type {labels.dtype}; give classes as whole numbers or strings")


def read_classes(labels: Sequence[np.ndarray], origin: str) -> tuple[object, ...]:
    """The distinct labels in sorted order: whole numbers by value, anything else as strings."""
    whole = all(part.dtype.kind == "i" for part in labels)
    distinct = set().union(*(np.unique(part).tolist() for part in labels))
    if len(distinct) > MAX_CLASSES:
        raise DataError(
            f"{origin} has {len(distinct)} distinct values, more than {MAX_CLASSES}; Tacit trains "
            "classifiers only. If these are classes, declare them with classes="
        )
    if len(distinct) == 1:
        raise DataError(
            f"{origin} has the one class {distinct.pop()!r}; give at least two classes, "
            "or declare them with classes="
        )
    return tuple(sorted(distinct) if whole else sorted(str(label) for label in distinct))


def declared_classes(classes: Classes) -> tuple[object, ...]:
    """The labels of classes 0..K-1: the sequence given, or 0..K-1 for a number K."""
    if isinstance(classes, str) or (isinstance(classes, int) and classes < 2):
        raise ValueError(f"classes is {classes!r}; give their number, at least 2, or their labels")
    labels = tuple(range(classes)) if isinstance(classes, int) else tuple(classes)
    if len({_key(label) for label in labels}) != len(labels) or len(labels) < 2:
        raise ValueError(f"classes is {list(labels)}; give at least two, each of them once")
    return labels


def encode(labels: np.ndarray, classes: Sequence[object], origin: str) -> np.ndarray:
    """The position of each label in `classes`. 3 and "3" are the same label."""
    position = {_key(label): i for i, label in enumerate(classes)}
    distinct, inverse = np.unique(labels, return_inverse=True)
    for label in distinct.tolist():
        if _key(label) not in position:
            record = int(np.flatnonzero(labels == label)[0]) + 1
            raise DataError(
                f"{origin} is {label!r} in record {record}, which is none of the classes "
                f"{', '.join(list(position)[:20])}; declare all of them with classes="
            )
    codes = np.array([position[_key(label)] for label in distinct.tolist()], dtype=np.int64)
    return codes[inverse]


def _key(label: object) -> str:
    if isinstance(label, bool | np.bool_):
        return str(int(label))
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label)


def read_csv(path: Path, target: str) -> Table:
    """Every column but the target must be numeric, and no cell may be empty."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            return _read_csv_rows(csv.reader(stream, strict=True), path, target)
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not text in UTF-8 ({error.reason}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check the path") from error


def _read_csv_rows(reader: CsvReader, path: Path, target: str) -> Table:
    header = tuple(name.strip() for name in next(reader, ()))
    if not header:
        raise DataError(f"{path} is empty; give a CSV file with a header row")
    at = require_column(target, header, path)
    features = header[:at] + header[at + 1 :]
    values, labels, lines = array("d"), [], array("q")
    for row in reader:
        if not row:
            continue  # a blank line
        if len(row) != len(header):
            raise DataError(
                f"line {reader.line_num} of {path} has {len(row)} cells and the header has "
                f"{len(header)}; give every column a cell in each line"
            )
        label = row.pop(at).strip()
        if not label:
            raise DataError(_empty(path, reader.line_num, target))
        labels.append(label)
        lines.append(reader.line_num)
        try:
            values.extend([_number(cell) for cell in row])
        except ValueError:
            _name_the_culprit(path, reader.line_num, features, row)
    table = np.frombuffer(values, np.float64) if values else np.empty(0)
    table = table.reshape(len(labels), len(features))
    _check_finite(table, path, features, lines)
    return Table(path, as_float32(table, path, "a cell"), np.array(labels, dtype=str), features)


def _number(cell: str) -> float:
    if "_" in cell:  # float() reads 1_000 as a thousand; in a file it is a name
        raise ValueError
    return float(cell)


def _name_the_culprit(path: Path, line: int, features: tuple[str, ...], row: list[str]) -> None:
    for name, cell in zip(features, row, strict=True):
        if not cell.strip():
            raise DataError(_empty(path, line, name))
        try:
            _number(cell)
        except ValueError:
            raise DataError(
                f"column {name!r} of {path} is not numeric: line {line} has {cell!r}; encode it "
                "as numbers (for example one 0/1 column a category), or drop it"
            ) from None
    raise AssertionError("a cell was refused before")


def _empty(path: Path, line: int, column: str) -> str:
    return (
        f"line {line} of {path} has an empty cell in column {column!r}; fill it in or drop the line"
    )


def _check_finite(table: np.ndarray, path: Path, features: tuple[str, ...], lines: array) -> None:
    limit = float(np.finfo(np.float32).max)
    bad = np.argwhere(~(np.abs(table) <= limit))
    if len(bad):
        row, column = bad[0]
        value = table[row, column]
        why = "is not finite" if not math.isfinite(value) else "does not fit in float32"
        raise DataError(
            f"line {lines[row]} of {path} has {value:g} in column {features[column]!r}, which "
            f"{why}; fill it in or drop the line"
        )


def read_parquet(path: Path, target: str) -> Table:
    """Every column but the target must be numeric or boolean, without nulls."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"reading {path} needs pyarrow, which is not installed; pip install 'tacit[parquet]', "
            "or save the table as .csv or .npz"
        ) from error
    if not path.is_file():
        raise DataError(f"there is no file {path}; check the path")
    try:
        table = pyarrow.parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged or is not a Parquet file ({error})") from error
    names = tuple(table.column_names)
    at = require_column(target, names, path)
    features = names[:at] + names[at + 1 :]
    columns = [_numbers(table.column(name), name, path) for name in features]
    stacked = np.stack(columns, axis=1) if columns else np.empty((table.num_rows, 0), np.float32)
    return Table(path, stacked, _labels(table.column(at), target, path), features)


def _numbers(column: Any, name: str, path: Path) -> np.ndarray:
    from pyarrow import types

    _refuse_nulls(column, name, path)
    kind = column.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise DataError(
            f"column {name!r} of {path} has type {kind}, not numbers; encode it as numbers "
            "(for example one 0/1 column a category), or drop it"
        )
    return as_float32(column.to_numpy(), path, f"column {name!r}")


def _labels(column: Any, name: str, path: Path) -> np.ndarray:
    from pyarrow import types

    _refuse_nulls(column, name, path)
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return np.asarray(column.to_pylist())
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return np.array(column.to_pylist(), dtype=str)
    raise DataError(f"the target {name!r} of {path} has type {kind}; give whole numbers or strings")


def _refuse_nulls(column: Any, name: str, path: Path) -> None:
    if column.null_count:
        row = column.is_null().to_pylist().index(True) + 1
        raise DataError(
            f"row {row} of {path} is empty in column {name!r}; fill it in or drop the row"
        )


INPUT_NAMES = ("X", "inputs")


def read_npz(path: Path, target: str) -> Table:
    """`target` names the targets; the inputs are named X or inputs, or are the only other array."""
    names = array_names(path)
    others = [name for name in names if name != target]
    if target not in names:
        raise DataError(f"{path} has no array {target!r}; it has {', '.join(names) or 'none'}")
    named = [name for name in INPUT_NAMES if name in others] or others
    if len(named) != 1:
        raise DataError(
            f"{path} has the arrays {', '.join(names)}; name the inputs X or inputs, so that "
            f"they can be told from {target!r} and the others"
        )
    inputs, labels = read_arrays(path, (named[0], target))
    if inputs.ndim < 2:
        raise DataError(
            f"array {named[0]!r} of {path} has shape {inputs.shape}; give one row a record, "
            "as (n, d) or as images (n, channels, height, width)"
        )
    if labels.ndim != 1:
        raise DataError(f"array {target!r} of {path} has shape {labels.shape}; expected (n,)")
    if labels.dtype.kind == "S":
        labels = np.char.decode(labels, "utf-8")
    return Table(path, as_float32(inputs, path, f"array {named[0]!r}"), labels)


_READERS: dict[str, Callable[[Path, str], Table]] = {
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".npz": read_npz,
}


def load_file(
    path: str | os.PathLike[str],
    target: str,
    *,
    classes: Classes | None = None,
    public_size: int | None = None,
    scale: str | Scaler | list[Scaler] | tuple[Scaler, ...] | None = None,
    feature_range: tuple[Constants, Constants] | None = None,
    test_fraction: float = 0.2,
    test_path: str | os.PathLike[str] | None = None,
) -> tuple[Records, Records]:
    """(train, test) from a file of one's own, whose `target` column or array holds the classes.

    `classes` declares the classes, as their number or as a list of labels; without it they are
    read off the file, and a note says so. `public_size` declares the number of records in
    `path`; without it sizes stay private. `feature_range` = (lower, upper), one number or one a
    feature, declares the range that inputs are clipped to and mapped from onto [-1, 1]; `scale`
    takes any other scaler. Test records are those of `test_path`, or a share `test_fraction` of
    `path` by a hash of each record alone (see `split_by_content`).
    """
    if not 0 <= test_fraction < 1:
        raise ValueError(f"test_fraction is {test_fraction}; give a number from 0 to below 1")
    if public_size is not None and public_size < 1:
        raise ValueError(f"public_size is {public_size}; declare a positive number of records")
    scalers = file_scalers(scale, feature_range)
    declared = None if classes is None else declared_classes(classes)
    train = _read_file(Path(path), target)
    if test_path is None:
        rows = split_by_content(train.features, train.labels, test_fraction)
        if not len(rows[0]):
            raise DataError(f"no record of {train.path} is left for training; give test_path")
        test, kept = train, 1 - test_fraction
        split = (
            f"each record by a hash of itself, about {test_fraction:g} of all for test; epsilon "
            "is for a training record, and one in its place that falls to training too"
        )
    else:
        test, kept = _matching(_read_file(Path(test_path), target), train), 1.0
        rows = np.arange(len(train.labels)), np.arange(len(test.labels))
        split = f"the test records are those of {test.path.name}"

    labels = [canonical(table.labels, _origin(table, target)) for table in (train, test)]
    names = declared or read_classes(labels, _origin(train, target))
    notes = (
        f"split: {split}",
        _class_note(names, declared is not None),
        _size_note(public_size),
        *([scaler.describe() for scaler in scalers] or [_UNSCALED]),
    )
    sizes: tuple[int | None, int | None] = (None, None)
    if public_size is not None:
        num_train = max(1, round(kept * public_size))
        sizes = (num_train, public_size - num_train or None)

    def records(i: int, table: Table) -> Records:
        targets = encode(labels[i], names, _origin(table, target))[rows[i]]
        return Records(
            scaled(table.features[rows[i]], scalers),
            torch.from_numpy(targets),
            num_classes=len(names),
            public_size=sizes[i],
            name=table.path.name,
            record_ids=torch.from_numpy(rows[i].astype(np.int64)),
            num_ids=public_size,
            notes=notes,
        )

    return records(0, train), records(1, test)


_UNSCALED = (
    "inputs were not scaled; declare a range with feature_range=, or constants with "
    "scale=PublicScaler(mean, std)"
)


def _read_file(path: Path, target: str) -> Table:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} ends in {path.suffix or 'no suffix'}; give a file that ends in "
            f"{', '.join(_READERS)}"
        )
    if not path.is_file():
        raise DataError(f"there is no file {path}; check the path")
    return reader(path, target)


def _origin(table: Table, target: str) -> str:
    return f"target {target!r} of {table.path}"


def _matching(test: Table, train: Table) -> Table:
    """The test table with the training table's features, in its order."""
    test = test.reordered(train.columns)
    if test.features.shape[1:] != train.features.shape[1:]:
        raise DataError(
            f"records of {test.path} have shape {test.features.shape[1:]} and those of "
            f"{train.path} have {train.features.shape[1:]}; give the same features"
        )
    return test


def file_scalers(
    scale: object, feature_range: tuple[Constants, Constants] | None
) -> tuple[Scaler, ...]:
    """The scalers that `load_file` puts its inputs through, in turn."""
    if scale == "public":
        if feature_range is None:
            raise UndeclaredConstant(
                "nothing was published about a file of one's own, so scale='public' has no "
                "constants; declare feature_range=(lower, upper) or PublicScaler(mean, std)"
            )
        scale = None
    scalers = as_scalers(scale)
    if feature_range is None:
        return scalers
    if len(feature_range) != 2:
        raise ValueError(f"feature_range is {feature_range}; give (lower, upper)")
    return (RangeScaler(*feature_range), *scalers)


def _class_note(names: tuple[object, ...], were_declared: bool) -> str:
    shown = ", ".join(f"{i} = {name}" for i, name in enumerate(names[:20]))
    shown += ", ..." if len(names) > 20 else ""
    if were_declared:
        return f"classes were declared: {shown}"
    return (
        "classes were read from the file and are treated as public; "
        f"declare them with classes= ({shown})"
    )


def _size_note(public_size: int | None) -> str:
    if public_size is None:
        return (
            "the number of records is private: public_size was not declared, so rates and "
            "divisors must be"
        )
    return f"the number of records was declared public: {public_size}"
