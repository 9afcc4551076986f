"""Splits that never depend on other records: by a public permutation, by a hash, or by id."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch

from tacit.errors import argument
from tacit.records import Records

SPLIT_SEED = 20_240_229


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
    """Positions (train, test) of a *private* file: a hash of each record alone decides.

    test ⇔ hash(x, y) < test_fraction · 2⁶⁴. Adding or removing a row moves no other row. With a
    permutation of all rows, neighbouring files would get training sets that differ in many
    records. Equal rows stay together.
    """
    threshold = round(test_fraction * 2**64)
    rows = np.ascontiguousarray(features).reshape(len(features), -1)
    in_test = np.empty(len(rows), dtype=bool)
    for i, (row, label) in enumerate(zip(rows, labels.tolist(), strict=True)):
        digest = hashlib.blake2b(row.tobytes(), digest_size=8, person=b"tacit-split")
        digest.update(str(label).encode())
        in_test[i] = int.from_bytes(digest.digest(), "little") < threshold
    return np.flatnonzero(~in_test), np.flatnonzero(in_test)


def split_public(records: Records, share: float, seed: int = SPLIT_SEED) -> tuple[Records, Records]:
    """(public, private): under a public permutation π of the declared ids, π(i) < n is public.

    Who is public depends on ids, never on the data, so a record added to the private side moves no
    other. Private records are renumbered by π(i) − n: their ids are 0 … N − n − 1, as samplers of
    mini-sets need them. The guarantee of a run on the private side does not cover the public
    records at all.
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share}; give a number between 0 and 1, such as 0.1")
    num_ids = records.require_num_ids("a public share of the records")
    count = max(1, round(share * num_ids))
    if count >= num_ids:
        raise ValueError(
            f"{argument('share', '--public-share')} is {share}, which leaves none of {num_ids} "
            "records private; give less"
        )
    order = np.random.RandomState(seed % 2**32).permutation(num_ids)
    place = torch.from_numpy(order).to(records.device)[records.record_ids]
    # Ids may have gaps, as after a split by permutation: a share of them is one of the records.
    declared = records.public_size or num_ids
    public_size = max(1, round(declared * count / num_ids))
    about = "" if declared == num_ids else "about "
    note = (
        f"{about}{public_size} of {declared} records were given up as public: epsilon does not "
        "cover them"
    )
    is_public = place < count
    public = replace(
        records.take(is_public),
        record_ids=place[is_public],
        public_size=public_size,
        num_ids=count,
        name=f"{records.name}, public share",
    )
    private = replace(
        records.take(~is_public),
        record_ids=(place - count)[~is_public],
        public_size=declared - public_size,
        num_ids=num_ids - count,
        notes=(*records.notes, note),
    )
    return public, private
