"""`load_file`: a user's own .csv, .parquet or .npz as two `Records`, train and test.

The file is read (`table_formats`), split by a hash of each record or by a second file, its labels
become classes 0..K-1, and its features go through declared scalers. Whatever is not declared is
said in the records' notes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tacit.data.scaling import Constants, RangeScaler, Scaler, as_scalers, scaled
from tacit.data.splits import split_by_content
from tacit.data.table_formats import read_table
from tacit.errors import DataError, UndeclaredConstant, argument, in_words
from tacit.records import Records

MAX_CLASSES = 1000


def load_file(
    path: str | os.PathLike[str],
    target: str,
    *,
    classes: int | Sequence[object] | None = None,
    public_size: int | None = None,
    scale: str | Scaler | list[Scaler] | tuple[Scaler, ...] | None = None,
    feature_range: tuple[Constants, Constants] | None = None,
    test_fraction: float = 0.2,
    test_path: str | os.PathLike[str] | None = None,
) -> tuple[Records, Records]:
    """(train, test) from your own file, whose `target` column or array holds the classes.

    Args:
        classes: declares the classes, as their number or as a list of labels. Without it they are
            read off the file, and a note says so.
        public_size: declares the number of records in `path`. Without it sizes stay private.
        scale: a scaler, or several to apply in turn.
        feature_range: (lower, upper), one number or one per feature: the declared range that
            inputs are clipped to and mapped from onto [-1, 1], before `scale`.
        test_fraction: the share of `path` that is for test, by a hash of each record alone (see
            `split_by_content`).
        test_path: a file with the test records instead.

        train, test = tacit.load_file("patients.csv", "outcome", classes=2, public_size=5000)
    """
    if not 0 <= test_fraction < 1:
        raise ValueError(f"test_fraction is {test_fraction}; give a number from 0 to below 1")
    if public_size is not None and public_size < 1:
        raise ValueError(
            f"{argument('public_size')} is {public_size}; declare a positive number of records"
        )
    scalers = file_scalers(scale, feature_range)
    declared = None if classes is None else _names_of(classes)
    train = read_table(Path(path), target)
    if test_path is None:
        rows = split_by_content(train.features, train.labels, test_fraction)
        if not len(rows[0]):
            raise DataError(
                f"no record of {train.path} is left for training; give "
                f"{argument('test_path', '--test-data')}"
            )
        test, train_share = train, 1 - test_fraction
        split = (
            f"each record by a hash of itself, about {test_fraction:g} of all for test; epsilon "
            "is for a training record, and one in its place that falls to training too"
        )
    else:
        test, train_share = read_table(Path(test_path), target).like(train), 1.0
        rows = np.arange(len(train.labels)), np.arange(len(test.labels))
        split = f"the test records are those of {test.path.name}"

    tables = train, test
    origins = [f"target {target!r} of {table.path}" for table in tables]
    labels = [_canonical(t.labels, origin) for t, origin in zip(tables, origins, strict=True)]
    names = declared or _names_in(labels, origins[0])
    notes = (
        f"split: {split}",
        _class_note(names, declared is not None),
        _size_note(public_size),
        *([scaler.describe() for scaler in scalers] or [_unscaled()]),
    )
    sizes: tuple[int | None, int | None] = (None, None)
    if public_size is not None:
        num_train = max(1, round(train_share * public_size))
        sizes = (num_train, public_size - num_train or None)

    def records(i: int) -> Records:
        return Records(
            scaled(tables[i].features[rows[i]], scalers),
            torch.from_numpy(_encode(labels[i], names, origins[i])[rows[i]]),
            num_classes=len(names),
            public_size=sizes[i],
            name=tables[i].path.name,
            record_ids=torch.from_numpy(rows[i].astype(np.int64)),
            num_ids=public_size,
            notes=notes,
        )

    return records(0), records(1)


def file_scalers(
    scale: object, feature_range: tuple[Constants, Constants] | None
) -> tuple[Scaler, ...]:
    """The scalers that `load_file` puts its inputs through, in turn."""
    if scale == "public":
        if feature_range is None:
            raise UndeclaredConstant(
                "nothing was published about your own file, so scale='public' has no "
                "constants; declare feature_range=(lower, upper) or PublicScaler(mean, std)"
            )
        scale = None
    scalers = as_scalers(scale)
    if feature_range is None:
        return scalers
    if len(feature_range) != 2:
        raise ValueError(f"{argument('feature_range')} is {feature_range}; give (lower, upper)")
    return (RangeScaler(*feature_range), *scalers)


def _canonical(labels: np.ndarray, origin: str) -> np.ndarray:
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
    if kind not in "biuf":
        raise DataError(
            f"{origin} has type {labels.dtype}; give classes as whole numbers or strings"
        )
    if kind == "f":
        without = np.flatnonzero(~np.isfinite(labels))
        if len(without):
            raise DataError(
                f"{origin} is {labels[without[0]]} in record {without[0] + 1}; drop the records "
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


def _names_in(labels: Sequence[np.ndarray], origin: str) -> tuple[str, ...]:
    """The distinct labels in sorted order: whole numbers by value, anything else as strings."""
    whole = all(part.dtype.kind == "i" for part in labels)
    distinct = set().union(*(np.unique(part).tolist() for part in labels))
    if len(distinct) > MAX_CLASSES:
        raise DataError(
            f"{origin} has {len(distinct)} distinct values, more than {MAX_CLASSES}; Tacit trains "
            f"classifiers only. If these are classes, declare them with {argument('classes')}"
        )
    if len(distinct) == 1:
        raise DataError(
            f"{origin} has the one class {distinct.pop()!r}; give at least two classes, "
            f"or declare them with {argument('classes')}"
        )
    return tuple(map(str, sorted(distinct) if whole else sorted(set(map(str, distinct)))))


def _names_of(classes: int | Sequence[object]) -> tuple[str, ...]:
    """The declared labels of classes 0..K-1; 3, 3.0 and "3" are the same label."""
    if isinstance(classes, str) or (isinstance(classes, int) and classes < 2):
        raise ValueError(
            f"{argument('classes')} is {classes!r}; give their number, at least 2, or their labels"
        )
    labels = range(classes) if isinstance(classes, int) else classes
    names = tuple(
        str(int(label))
        if isinstance(label, bool | np.bool_) or (isinstance(label, float) and label.is_integer())
        else str(label)
        for label in labels
    )
    if len(set(names)) != len(names) or len(names) < 2:
        given = in_words(str(list(labels)), ",".join(map(str, labels)))
        raise ValueError(f"{argument('classes')} is {given}; give at least two, each of them once")
    return names


def _encode(labels: np.ndarray, names: tuple[str, ...], origin: str) -> np.ndarray:
    """The position of each label in `names`."""
    position = {name: i for i, name in enumerate(names)}
    distinct, inverse = np.unique(labels, return_inverse=True)
    for label in distinct.tolist():
        if str(label) not in position:
            record = int(np.flatnonzero(labels == label)[0]) + 1
            raise DataError(
                f"{origin} is {label!r} in record {record}, which is none of the classes "
                f"{', '.join(names[:20])}; declare all of them with {argument('classes')}"
            )
    return np.array([position[str(label)] for label in distinct.tolist()], dtype=np.int64)[inverse]


def _unscaled() -> str:
    return "inputs were not scaled; declare a range with " + in_words(
        "feature_range=, or constants with scale=PublicScaler(mean, std)",
        "--feature-range lower,upper, or divide each record by its norm with --unit-norm",
    )


def _class_note(names: tuple[str, ...], declared: bool) -> str:
    shown = ", ".join(f"{i} = {name}" for i, name in enumerate(names[:20]))
    shown += ", ..." if len(names) > 20 else ""
    if declared:
        return f"classes were declared: {shown}"
    return (
        "classes were read from the file and are treated as public; "
        f"declare them with {argument('classes')} ({shown})"
    )


def _size_note(public_size: int | None) -> str:
    if public_size is not None:
        return f"the number of records was declared public: {public_size}"
    return (
        "the number of records is private: public_size was not declared, so rates and divisors "
        "must be"
    )
