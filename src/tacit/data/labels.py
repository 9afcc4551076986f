"""From the labels in a user's file to classes 0..K-1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tacit.errors import DataError

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
