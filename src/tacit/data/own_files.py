"""`load_file`: a user's own .csv, .parquet or .npz as two `Records`, train and test."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tacit.data.csv_table import read_csv
from tacit.data.labels import Classes, canonical, declared_classes, encode, read_classes
from tacit.data.npz_table import read_npz
from tacit.data.parquet_table import read_parquet
from tacit.data.records import Records
from tacit.data.scaling import Constants, RangeScaler, Scaler, as_scalers, scaled
from tacit.data.splits import split_by_content
from tacit.data.table import Table
from tacit.errors import DataError, UndeclaredConstant

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
    train = _read(Path(path), target)
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
        test, kept = _matching(_read(Path(test_path), target), train), 1.0
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


def _read(path: Path, target: str) -> Table:
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
