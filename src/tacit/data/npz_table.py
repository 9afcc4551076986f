"""Read a user's `.npz` file: one array of inputs, one of targets."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tacit.data.npz import array_names, read_arrays
from tacit.data.table import Table, as_float32
from tacit.errors import DataError

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
