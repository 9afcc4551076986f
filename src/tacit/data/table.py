"""A user's file after reading: features as numbers, one label a record, nothing scaled or split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tacit.errors import DataError


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
