"""`load_file`: a user's own table as two `Records`, train and test.

With a schema, its columns become numbers as the schema declares (`table_schema`). Without one, the
table holds numbers (`table_formats`): its labels become classes 0..K-1, and its features go through
declared scalers. The records are split by a hash of each, or come from two tables. Whatever is not
declared is said in the records' notes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.data.scaling import Constants, RangeScaler, Scaler, as_scalers, scaled
from tacit.data.splits import split_by_content
from tacit.data.table_formats import read_table
from tacit.data.table_schema import Schema
from tacit.errors import DataError, UndeclaredConstant, argument, in_words, shown
from tacit.records import Records

MAX_CLASSES = 1000  # that are read off a table
_MOST_DECLARED = 1_000_000


def load_file(
    table: Any,
    target: str | Sequence[str] | None = None,
    *,
    schema: Schema | str | os.PathLike[str] | None = None,
    classes: int | Sequence[object] | None = None,
    public_size: int | None = None,
    scale: str | Scaler | list[Scaler] | tuple[Scaler, ...] | None = None,
    feature_range: tuple[Constants, Constants] | None = None,
    test_fraction: float = 0.2,
    test_path: Any = None,
) -> tuple[Records, Records]:
    """(train, test) from your own table, whose `target` column or array holds the classes.

    Args:
        table: the path of a .csv, .tsv, .parquet or .npz file, or a frame of pandas or polars, a
            pyarrow Table, or a mapping of columns.
        target: the column that is to be predicted. A schema may name it, or several of them.
        schema: a `Schema`, or the path of its file. It declares ranges, categories and classes, so
            that `classes` and `feature_range` are not given. Columns whose range it leaves to be
            released come as they are, NaN where missing: put them through `release_ranges`.
        classes: declares the classes, as their number or as a list of labels. Without it they are
            read off the file, and a note says so.
        public_size: declares the number of records in `table`. Without it sizes stay private.
        scale: a scaler, or several to apply in turn.
        feature_range: (lower, upper), one number or one per feature: the declared range that
            inputs are clipped to and mapped from onto [-1, 1], before `scale`.
        test_fraction: the share of `table` that is for test, by a hash of each record alone (see
            `split_by_content`).
        test_path: a table, or the path of one, with the test records instead.

        train, test = tacit.load_file("patients.csv", "outcome", classes=2, public_size=5000)
        train, test = tacit.load_file(frame, schema="schema.toml", public_size=5000)
    """
    if not isinstance(test_fraction, Real) or not 0 <= test_fraction < 1:
        raise ValueError(
            f"test_fraction is {shown(test_fraction)}; give a number from 0 to below 1"
        )
    if public_size is not None and not (isinstance(public_size, Integral) and public_size >= 1):
        raise ValueError(
            f"{argument('public_size')} is {shown(public_size)}; declare a positive number of "
            "records"
        )
    if schema is not None:
        if classes is not None or feature_range is not None:
            given = argument("classes" if classes is not None else "feature_range")
            raise ValueError(f"a schema declares classes and ranges; leave {given} out")
        schema = schema if isinstance(schema, Schema) else Schema.read(schema)
        schema = schema if target is None else schema.with_target(target)
        return _load_encoded(
            table, schema, as_scalers(scale), public_size, test_fraction, test_path
        )
    if not isinstance(target, str):
        raise ValueError(f"target is {shown(target)}; name the column that holds the classes")
    scalers = file_scalers(scale, feature_range)
    declared = None if classes is None else _names_of(classes)
    train = read_table(table, target)
    if test_path is None:
        rows, split = _split(train.features, train.labels, test_fraction, str(train.path))
        test = train
    else:
        test = read_table(test_path, target).like(train)
        rows = np.arange(len(train.labels)), np.arange(len(test.labels))
        split = f"the test records are those of {test.path.name}"
    share = 1.0 if test_path is not None else 1 - test_fraction

    tables = train, test
    origins = [f"target {target!r} of {table.path}" for table in tables]
    labels = [_canonical(t.labels, origin) for t, origin in zip(tables, origins, strict=True)]
    names = declared or _names_in(labels, origins[0])
    notes = (
        f"split: {split}",
        _class_note(names, declared is not None),
        _size_note(public_size),
        *([scaler.describe() for scaler in scalers] or [unscaled_note()]),
    )
    sizes = _sizes(public_size, share)

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
            class_names=names,
            feature_names=train.columns or None,
        )

    return records(0), records(1)


def _load_encoded(
    table: Any,
    schema: Schema,
    scalers: tuple[Scaler, ...],
    public_size: int | None,
    test_fraction: float,
    test_table: Any,
) -> tuple[Records, Records]:
    """`load_file` with a schema."""
    if scalers and schema.released_entries:
        raise ValueError(
            "scale is given, and the schema has columns whose range is to be released, which must "
            "come first; apply the scaler after the stage of tacit.data.release_ranges"
        )
    inputs, targets = schema.encoded(table)
    if not len(inputs):
        raise DataError(f"{_name_of(table)} has no records; give a table with at least one")
    test_inputs, test_targets = inputs, targets
    share = 1.0
    if test_table is None:
        clipped = _clipped(schema, targets).numpy()
        rows, split = _split(inputs.numpy(), clipped, test_fraction, _name_of(table))
        share -= test_fraction
    else:
        test_inputs, test_targets = schema.encoded(test_table)
        rows = np.arange(len(inputs)), np.arange(len(test_inputs))
        split = f"the test records are those of {_name_of(test_table)}"
    sizes = _sizes(public_size, share)
    class_names = schema.class_names
    notes = (
        f"split: {split}",
        *([_class_note(class_names, declared=True)] if class_names else []),
        *([_range_note(schema)] if schema.task == "regression" else []),
        _size_note(public_size),
        _SCHEMA_NOTE,
        *([unreleased_note(schema)] if schema.released_entries else []),
        *(scaler.describe() for scaler in scalers),
    )

    def records(x: Tensor, y: Tensor, own: np.ndarray, size: int | None, source: Any) -> Records:
        return Records(
            scaled(x.numpy()[own], scalers),
            y[torch.from_numpy(own)],
            num_classes=len(class_names or ()) if schema.task == "classification" else None,
            public_size=size,
            name=_name_of(source),
            record_ids=torch.from_numpy(own.astype(np.int64)),
            num_ids=public_size,
            notes=notes,
            class_names=class_names,
            feature_names=schema.feature_names,
        )

    test_source = table if test_table is None else test_table
    return (
        records(inputs, _clipped(schema, targets), rows[0], sizes[0], table),
        records(test_inputs, test_targets, rows[1], sizes[1], test_source),
    )


def _clipped(schema: Schema, targets: Tensor) -> Tensor:
    """A regression's targets clipped to their range: training uses these, measurements do not."""
    return targets.clamp(-1, 1) if schema.task == "regression" else targets


def _name_of(table: Any) -> str:
    return Path(table).name if isinstance(table, str | os.PathLike) else "table"


def _split(
    features: np.ndarray, labels: np.ndarray, test_fraction: float, source: str
) -> tuple[tuple[np.ndarray, np.ndarray], str]:
    """The rows for training and for test, by a hash of each record, and a note about it."""
    rows = split_by_content(features, labels, test_fraction)
    if not len(rows[0]):
        raise DataError(
            f"no record of {source} is left for training; give "
            f"{argument('test_path', '--test-data')}"
        )
    return rows, (
        f"each record by a hash of itself, about {test_fraction:g} of all for test; epsilon "
        "is for a training record, and one in its place that falls to training too"
    )


def _sizes(public_size: int | None, train_share: float) -> tuple[int | None, int | None]:
    """The declared numbers of records for training and for test."""
    if public_size is None:
        return None, None
    num_train = max(1, round(train_share * public_size))
    return num_train, public_size - num_train or None


def file_scalers(
    scale: object, feature_range: tuple[Constants, Constants] | None
) -> tuple[Scaler, ...]:
    """The scalers that `load_file` puts its inputs through, in turn."""
    if isinstance(scale, str) and scale == "public":
        if feature_range is None:
            raise UndeclaredConstant(
                "nothing was published about your own file, so scale='public' has no "
                "constants; declare feature_range=(lower, upper) or PublicScaler(mean, std)"
            )
        scale = None
    scalers = as_scalers(scale)
    if feature_range is None:
        return scalers
    several = isinstance(feature_range, tuple | list | np.ndarray | Tensor)
    if not several or len(feature_range) != 2:
        raise ValueError(
            f"{argument('feature_range')} is {shown(feature_range)}; give (lower, upper)"
        )
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
                f"{fractions[0] + 1}); give classes as whole numbers or strings, or, for a "
                "regression, a schema whose target is numeric with a range"
            )
    return labels.astype(np.int64)


def _names_in(labels: Sequence[np.ndarray], origin: str) -> tuple[str, ...]:
    """The distinct labels in sorted order: whole numbers by value, anything else as strings."""
    whole = all(part.dtype.kind == "i" for part in labels)
    distinct = set().union(*(np.unique(part).tolist() for part in labels))
    if len(distinct) > MAX_CLASSES:
        raise DataError(
            f"{origin} has {len(distinct)} distinct values, more than {MAX_CLASSES}; if these are "
            f"classes, declare them with {argument('classes=', '--classes')}; for a regression, "
            "give a schema"
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
    if isinstance(classes, int) and classes > _MOST_DECLARED:
        raise ValueError(
            f"{argument('classes')} is {classes}; give at most {_MOST_DECLARED:,}, or labels"
        )
    labels = range(classes) if isinstance(classes, int) else classes
    names = tuple(
        str(int(label))
        if isinstance(label, bool | np.bool_) or (isinstance(label, float) and label.is_integer())
        else str(label)
        for label in labels
    )
    if len(set(names)) != len(names) or len(names) < 2:
        given = in_words(shown(list(labels)), ",".join(map(str, labels)))
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


def unscaled_note() -> str:
    return "inputs were not scaled; declare a range with " + in_words(
        "feature_range=, or constants with scale=PublicScaler(mean, std)",
        "--feature-range lower,upper, or divide each record by its norm with --unit-norm",
    )


_SCHEMA_NOTE = (
    "inputs were encoded by a schema; the ranges and categories in it were declared public"
)


def unreleased_note(schema: Schema) -> str:
    names = [schema.feature_names[i] for i in schema.released_entries]
    return (
        f"the ranges of {', '.join(names[:20])}{', ...' if len(names) > 20 else ''} were not "
        "declared, and these inputs are as they stand; release their ranges with "
        "tacit.data.release_ranges"
    )


def _range_note(schema: Schema) -> str:
    lower, upper = schema.target_range
    return (
        f"targets were clipped to the declared range [{lower:g}, {upper:g}] and mapped to [-1, 1]"
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
