"""Train and test for data that comes without a split, chosen without looking at other records."""

from __future__ import annotations

import hashlib

import numpy as np

SPLIT_SEED = 20_240_229
_SPAN = 2**64


def fixed_split(train_size: int, test_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions (train, test) of a *published* dataset: one public permutation, the same for all.

    RandomState and not Generator: its stream is frozen, so the split is the same in every
    version of numpy. Positions are sorted, and name the records (see `Records.record_ids`).
    """
    order = np.random.RandomState(SPLIT_SEED).permutation(train_size + test_size)
    return np.sort(order[test_size:]), np.sort(order[:test_size])


def split_by_content(
    features: np.ndarray, labels: np.ndarray, test_fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Positions (train, test) of a *private* file: each record goes by a hash of itself alone.

    test ⇔ hash(x, y) < test_fraction · 2⁶⁴. A permutation of all rows would not do: without one
    row it is another permutation, and neighbouring files would get training sets that differ in
    many records. Here adding or removing a row moves no other row. Equal rows stay together.
    """
    threshold = round(test_fraction * _SPAN)
    rows = np.ascontiguousarray(features).reshape(len(features), -1)
    in_test = np.empty(len(rows), dtype=bool)
    for i, (row, label) in enumerate(zip(rows, labels.tolist(), strict=True)):
        digest = hashlib.blake2b(row.tobytes(), digest_size=8, person=b"tacit-split")
        digest.update(str(label).encode())
        in_test[i] = int.from_bytes(digest.digest(), "little") < threshold
    return np.flatnonzero(~in_test), np.flatnonzero(in_test)
