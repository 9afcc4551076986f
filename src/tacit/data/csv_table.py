"""Read a user's CSV file: a header row, then numbers, and one target column."""

from __future__ import annotations

import csv
import math
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tacit.data.table import Table, as_float32, require_column
from tacit.errors import DataError

if TYPE_CHECKING:
    from _csv import Reader as CsvReader


def read_csv(path: Path, target: str) -> Table:
    """Every column but the target must be numeric, and no cell may be empty."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            return _read(csv.reader(stream, strict=True), path, target)
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not text in UTF-8 ({error.reason}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check the path") from error


def _read(reader: CsvReader, path: Path, target: str) -> Table:
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
