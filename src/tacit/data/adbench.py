"""Read ADBench's tabular sets: `X` (n, d) and `y` (n,), where 1 is an anomaly and 0 is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tacit.data.npz import read_arrays
from tacit.errors import DataError


def read_adbench(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features as contiguous float32 (the files are column-major float64) and labels as int64."""
    features, labels = read_arrays(path, ("X", "y"))
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise DataError(
            f"{path} has X of shape {features.shape} and y of shape {labels.shape}; "
            "expected (n, d) and (n,)"
        )
    if not np.isin(labels, (0, 1)).all():
        raise DataError(f"{path} has labels other than 0 and 1; it is not an ADBench file")
    return np.ascontiguousarray(features, np.float32), labels.astype(np.int64)
