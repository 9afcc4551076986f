"""A share of the records given up as public, chosen by id alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tacit.data.records import Records
from tacit.data.splits import SPLIT_SEED
from tacit.errors import UndeclaredConstant


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
