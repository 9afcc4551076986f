"""Read a user's Parquet file, with pyarrow when it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tacit.data.table import Table, as_float32, require_column
from tacit.errors import DataError


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
