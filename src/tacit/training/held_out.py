"""Records to evaluate on must be held out: what is read off them goes out without noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from tacit.data.records import Records
from tacit.errors import NotPublic
from tacit.pytrees import Tree, flat_rows, tensors_of
from tacit.queries.public_set import found_among

_ROWS_TO_COMPARE = 64
NOT_COVERED = (
    "evaluated on Unprotected records: epsilon does not cover the metrics that were read off them"
)

SHOWN = (
    "metrics are of records most of which equal training records: epsilon does not cover what "
    "those show; look at records that were held out"
)


@dataclass(frozen=True)
class Unprotected:
    """Records to evaluate on although they may be training records, as in a test or a study.

    Their accuracy and loss are released without noise, so ε does not cover them; the run says so.
    """

    records: Records


def require_held_out(evaluated: Records, private: Records) -> None:
    """Raise NotPublic if the records to evaluate on are, or were copied from, the private ones.

    Refused are one row of memory in common, and copies: of up to 64 rows from all over
    `evaluated`, most equal a private record, input and target. A few equal ones pass: datasets
    have duplicates.
    """
    if len(evaluated) == 0 or len(private) == 0:
        return
    remedy = (
        "their accuracy would go out without noise; give records that were held out, or "
        "evaluate_on=tacit.training.Unprotected(records) where epsilon need not cover it"
    )
    pairs = product(tensors_of(evaluated.inputs), tensors_of(private.inputs))
    if any(_rows_in_common(a, b) for a, b in pairs):
        raise NotPublic(f"evaluate_on {evaluated.name!r} holds training records; {remedy}")
    if _mostly_copied(evaluated, private):
        raise NotPublic(
            f"most records of evaluate_on {evaluated.name!r} are among the training records; "
            f"{remedy}"
        )


def are_training_records(evaluated: Records, private: Records) -> bool:
    """Whether `require_held_out` would refuse them."""
    try:
        require_held_out(evaluated, private)
    except NotPublic:
        return True
    return False


def _rows_in_common(a: Tensor, b: Tensor) -> bool:
    """Whether a row of `a` begins where a row of `b` does, in one memory."""
    if a.stride(0) == 0 or b.stride(0) == 0:
        return False  # one row for everybody, such as a mask of ones: nobody's own
    if a.device != b.device or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return bool(torch.isin(_places(a), _places(b)).any())


def _places(rows: Tensor) -> Tensor:
    begin, stride = int(rows.storage_offset()), int(rows.stride(0))
    return (begin + torch.arange(len(rows)) * stride) * rows.element_size()


def _mostly_copied(evaluated: Records, private: Records) -> bool:
    if evaluated.shape != private.shape:
        return False
    stride = -(-len(evaluated) // _ROWS_TO_COMPARE)
    some = evaluated.take(slice(None, None, stride))
    # Inputs alone first: to join them with their targets is to copy all private records.
    if found_among(_flat(some), _flat(private)) <= 0.5:
        return False
    if _shapes(some.targets) != _shapes(private.targets):
        return True
    return found_among(_joined(some), _joined(private)) > 0.5


def _flat(records: Records) -> Records:
    return replace(records, inputs=flat_rows(records.inputs))


def _joined(records: Records) -> Records:
    return replace(records, inputs=flat_rows((records.inputs, records.targets)))


def _shapes(tree: Tree) -> list[torch.Size]:
    return [tensor.shape[1:] for tensor in tensors_of(tree)]
