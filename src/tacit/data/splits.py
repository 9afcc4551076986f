"""Train and test for data without a split, and a share of the records given up as public.

Train and test for data that comes without a split, chosen without looking at other records.

A share of the records given up as public, chosen by id alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch

from tacit.errors import UndeclaredConstant
from tacit.records import Records

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


def split_public(records: Records, share: float, seed: int = SPLIT_SEED) -> tuple[Records, Records]:
    """(public, private): a public permutation π of the declared ids sends π(i) < n to the public.

    Who is public depends on ids, never on the data, so a record added to the private side moves
    nobody. Private records are numbered anew by π(i) − n: their ids are 0 … N − n − 1 again, as
    samplers of mini-sets like them. The guarantee of a run on the private side does not cover the
    public records at all.
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share}; give a number between 0 and 1, such as 0.1")
    num_ids = records.num_ids or records.require_public_size("a public share of the records")
    if len(records) and not 0 <= int(records.record_ids.min()) <= _largest(records) < num_ids:
        raise UndeclaredConstant(
            f"record ids reach {_largest(records)}, but ids are declared to be below {num_ids}; "
            "declare Records(..., num_ids=...) so that it covers all ids"
        )
    count = max(1, round(share * num_ids))
    if count >= num_ids:
        raise ValueError(f"a share of {share} leaves none of {num_ids} records private")
    order = np.random.RandomState(seed % 2**32).permutation(num_ids)
    place = torch.from_numpy(order).to(records.device)[records.record_ids]
    given_up = place < count
    left = num_ids - count
    # Ids may have gaps, as after a split by permutation: a share of them is one of the records.
    declared = records.public_size or num_ids
    public_size = max(1, round(declared * count / num_ids))

    def side(keep: torch.Tensor, ids: torch.Tensor, ids_left: int, size: int, name: str) -> Records:
        return replace(
            records.take(keep),
            record_ids=ids[keep],
            public_size=size,
            num_ids=ids_left,
            name=name,
        )

    public = side(given_up, place, count, public_size, f"{records.name}, public share")
    private = side(~given_up, place - count, left, declared - public_size, records.name)
    about = "" if declared == num_ids else "about "
    note = (
        f"{about}{public_size} of {declared} records were given up as public: epsilon does not "
        "cover them"
    )
    return public, replace(private, notes=(*records.notes, note))


def _largest(records: Records) -> int:
    return int(records.record_ids.max())
