"""The 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn: no file to fetch."""

from __future__ import annotations

import numpy as np


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 1, 8, 8) with values 0..16, and labels 0..9."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images[:, None].astype(np.float32), bunch.target.astype(np.int64)
