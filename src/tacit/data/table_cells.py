"""Read a table as columns of cells: a file, a frame of pandas, polars or Arrow, or a mapping.

`read_cells` tells numbers, truth values, dates and text apart and says which cells are missing; it
gives no meaning to them, which is what `table_columns` does. Every error names the row.
"""

from __future__ import annotations

import csv
import datetime
import difflib
import itertools
import math
import numbers
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tacit.errors import DataError

SUFFIXES = (".csv", ".tsv", ".parquet")
_DELIMITERS = ",;\t"
_NAMES_SHOWN = 12  # of a table's columns, in an error


@dataclass(frozen=True)
class Cells:
    """One column: `values` as float64, bool, datetime64[us] or strings, and which are `missing`.

    `lines` are the lines of the cells in a file of text, `source` names the file or frame.
    """

    name: str
    values: np.ndarray
    missing: np.ndarray
    source: str
    lines: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.values)

    def place(self, row: int) -> str:
        where = f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"
        return f"{where} of {self.source}"


@dataclass(frozen=True)
class TableCells:
    """The columns of a table by name, in their order, and what the table is called."""

    columns: dict[str, Cells]
    source: str
    num_rows: int


def read_cells(table: Any) -> TableCells:
    """The cells of a .csv, .tsv or .parquet file, a frame, a pyarrow Table, or a mapping."""
    (cells,) = read_chunks(table, size=sys.maxsize)
    return cells


def read_chunks(table: Any, size: int = 50_000) -> Iterator[TableCells]:
    """The same, at least once, and a file of text at most `size` rows at a time."""
    if isinstance(table, TableCells):
        yield table
    elif isinstance(table, str | os.PathLike):
        yield from _read_file(Path(table), size)
    else:
        yield _read_frame(table)


def _read_frame(table: Any) -> TableCells:
    kind = type(table).__module__.partition(".")[0]
    if kind == "pandas" and hasattr(table, "columns"):
        named = [(name, table.iloc[:, i]) for i, name in enumerate(table.columns)]
        return _collected([(n, _of_pandas(c)) for n, c in named], "the frame", len(table))
    if kind == "polars" and hasattr(table, "iter_columns"):
        named = [(c.name, c) for c in table.iter_columns()]
        return _collected([(n, _of_polars(c)) for n, c in named], "the frame", len(table))
    if kind == "pyarrow" and hasattr(table, "column_names"):
        return _read_arrow(table, "the table")
    if isinstance(table, Mapping):
        return _collected([(n, _plain(c)) for n, c in table.items()], "the table", None)
    raise TypeError(
        f"cannot read a table from {type(table).__name__}; give a path, a frame of pandas or "
        "polars, a pyarrow Table, or a dict of columns"
    )


def no_column(source: object, name: str, names: Sequence[str], what: str = "") -> DataError:
    """The error for a column that is not there: the nearest name, and the first of those there."""
    near = difflib.get_close_matches(name, names, 1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f", ... ({len(names)} in all)" if len(names) > _NAMES_SHOWN else ""
    return DataError(f"{source} has no column {name!r}{what}; {meant}its columns are {shown}{more}")


# ---- files of text -------------------------------------------------------------------------------


def _read_file(path: Path, size: int) -> Iterator[TableCells]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path} ends in {suffix or 'no suffix'}; give a file that ends in "
            f"{', '.join(SUFFIXES)}"
        )
    if not path.is_file():
        raise DataError(f"there is no file {path}; check the path")
    if suffix == ".parquet":
        yield _read_arrow(read_parquet(path), str(path))
        return
    rows = text_rows(path)
    _, header = next(rows)
    for i in itertools.count():
        chunk = list(itertools.islice(rows, size))
        if i and not chunk:
            return
        lines = np.array([line for line, _ in chunk], np.int64)
        columns = {}
        for j, name in enumerate(header):
            values = np.empty(len(chunk), object)
            values[:] = [row[j].strip() for _, row in chunk]
            columns[name] = Cells(name, values, np.zeros(len(chunk), bool), str(path), lines)
        yield TableCells(columns, str(path), len(chunk))


def text_rows(path: Path) -> Iterator[tuple[int, Sequence[str]]]:
    """The header of a .csv or .tsv file, then its rows, each with its line in the file.

    The delimiter is read off the header line alone; blank lines are left out.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            delimiter = "\t" if path.suffix.lower() == ".tsv" else delimiter_of(stream.readline())
            stream.seek(0)
            reader = csv.reader(stream, strict=True, delimiter=delimiter)
            header = tuple(name.strip() for name in next(reader, ()))
            if not header:
                raise DataError(f"{path} is empty; give a CSV file with a header row")
            require_distinct(header, str(path))
            yield 1, header
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise DataError(
                        f"line {reader.line_num} of {path} has {len(row)} cells and the header has "
                        f"{len(header)}; give every column a cell in each line"
                    )
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not text in UTF-8 ({error.reason}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check the path") from error


def delimiter_of(header: str) -> str:
    """The delimiter that a header line has most often outside of quotes; a comma if it has none.

    Only names are read for it: what is in the other lines is private.
    """
    outside = "".join(header.split('"')[::2])
    return max(_DELIMITERS, key=lambda mark: (outside.count(mark), mark == ","))


def require_distinct(names: Sequence[str], source: str) -> None:
    if len(set(names)) != len(names):
        double = next(name for i, name in enumerate(names) if name in names[:i])
        raise DataError(f"{source} has more than one column named {double!r}; rename one")


# ---- Parquet and frames --------------------------------------------------------------------------


def read_parquet(path: Path) -> Any:
    """A Parquet file as a pyarrow Table."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"reading {path} needs pyarrow, which is not installed; pip install 'tacit[parquet]', "
            "or save the table as .csv or .npz"
        ) from error
    try:
        table = pyarrow.parquet.ParquetFile(path).read()
        list(table.column_names)  # a name that is not UTF-8 raises here
        return table
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{path} is damaged or is not a Parquet file ({why})") from error


def _read_arrow(table: Any, source: str) -> TableCells:
    named = [
        (name, _of_arrow(table.column(i), name, source))
        for i, name in enumerate(table.column_names)
    ]
    return _collected(named, source, table.num_rows)


def _of_arrow(column: Any, name: str, source: str) -> Any:
    import pyarrow
    from pyarrow import types

    if types.is_integer(column.type) or types.is_floating(column.type):
        return column.to_numpy()  # null becomes NaN
    try:
        return column.to_pylist()
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise DataError(f"column {name!r} of {source} cannot be read ({error})") from error


def _of_pandas(column: Any) -> Any:
    kind = getattr(column.dtype, "kind", "O")
    if isinstance(column.dtype, np.dtype) and kind in "biufM":
        return column.to_numpy()
    if kind == "M":  # with a time zone
        return column.dt.tz_convert("UTC").dt.tz_localize(None).to_numpy()
    return column.tolist()


def _of_polars(column: Any) -> Any:
    return column.to_numpy() if column.dtype.is_numeric() else column.to_list()


def _collected(named: list[tuple[Any, Any]], source: str, num_rows: int | None) -> TableCells:
    names = tuple(str(name).strip() for name, _ in named)
    require_distinct(names, source)
    columns = {
        name: _as_cells(name, values, source)
        for name, (_, values) in zip(names, named, strict=True)
    }
    lengths = {len(cells) for cells in columns.values()}
    if len(lengths) > 1:
        raise DataError(f"the columns of {source} have {min(lengths)} to {max(lengths)} cells")
    return TableCells(columns, source, next(iter(lengths), num_rows or 0))


def _plain(values: Any) -> Any:
    """A column of a mapping as an array or a list."""
    kind = type(values).__module__.partition(".")[0]
    if kind == "pandas":
        return _of_pandas(values)
    if kind == "polars":
        return _of_polars(values)
    if hasattr(values, "__array__"):
        return np.asarray(values)
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise DataError(
            f"a column of the table is of type {type(values).__name__}; give each column as a "
            "list or an array with one cell per record"
        )
    return list(values)


def _as_cells(name: str, values: Any, source: str) -> Cells:
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise DataError(
                f"column {name!r} of {source} has shape {values.shape}; give one cell per record"
            )
        kind = values.dtype.kind
        if kind in "iuf":
            numbers_N = values.astype(np.float64)
            return Cells(name, numbers_N, np.isnan(numbers_N), source)
        if kind == "b":
            return Cells(name, values, np.zeros(len(values), bool), source)
        if kind == "M":
            return Cells(name, values.astype("datetime64[us]"), np.isnat(values), source)
        values = values.tolist()
    values = [_scalar(value) for value in values]
    missing = np.array([value is None for value in values], bool)
    kinds = {_kind(value, name, source, i) for i, value in enumerate(values) if value is not None}
    if not kinds or kinds == {"number"}:
        given = [np.nan if value is None else value for value in values]
        return Cells(name, np.array(given, np.float64), missing, source)
    if kinds == {"truth"}:
        return Cells(name, np.array([bool(value) for value in values]), missing, source)
    if kinds == {"date"}:
        days = [np.datetime64("NaT" if v is None else v, "us") for v in values]
        return Cells(name, np.array(days, "datetime64[us]"), missing, source)
    text = np.empty(len(values), object)
    text[:] = ["" if value is None else text_of(value).strip() for value in values]
    return Cells(name, text, missing, source)


def _scalar(value: Any) -> Any:
    """A cell as float, truth value, datetime or text; None for what pandas and Arrow call missing.

    It looks at no other cell. A column of several kinds becomes text, and its numbers and dates are
    then the same text as in a column of their own: otherwise one record more, with a text, would
    change what the others become.
    """
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, np.datetime64):
        value = value.astype("datetime64[us]")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, datetime.date):  # and datetime, which is one
        return _moment(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real) or type(value).__name__ == "Decimal":
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return None if number != number else number
    return value


def _kind(value: Any, name: str, source: str, row: int) -> str:
    for kind, name_of_kind in (
        (bool, "truth"),
        (float, "number"),
        (datetime.datetime, "date"),
        (str, "text"),
    ):
        if isinstance(value, kind):
            return name_of_kind
    raise DataError(
        f"row {row + 1} of {source} has a {type(value).__name__} in column {name!r}; give numbers, "
        "text, truth values or dates"
    )


def _moment(value: datetime.date) -> datetime.datetime:
    """A date or a time in UTC, without a time zone."""
    if not isinstance(value, datetime.datetime):
        return datetime.datetime(value.year, value.month, value.day)
    if value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    return value


def text_of(value: Any) -> str:
    """A cell as text: 3 for 3.0, true for True, ISO for a date, without a time at midnight."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        value = value.date()
    return value.isoformat() if isinstance(value, datetime.date) else str(value)


def number_of(cell: Any) -> float:
    """A cell as a number, or ValueError. 1_000, which Python reads, is a name in a file."""
    if isinstance(cell, str) and "_" in cell:
        raise ValueError
    return float(cell)


def decimal_comma(cell: Any) -> str:
    """What to say of a cell such as 3,14; empty for any other."""
    if isinstance(cell, str) and cell.count(",") == 1:
        with suppress(ValueError):
            number_of(cell.replace(",", "."))
            return ", which has a decimal comma: write numbers with a point, as 3.14"
    return ""
