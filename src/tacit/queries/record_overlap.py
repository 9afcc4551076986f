"""Are some records, which should be public or held out, private records?

Values that are computed from public or held-out records are released without noise. So private
records among them would be released as they are, and are refused where that can be seen: by shared
memory, by shared record ids, and by comparing some rows with all private ones. A few equal rows
pass, since datasets have duplicates. Records that are read when they are needed are compared with
only if they hold at most 1 GiB; of larger ones the source and the row numbers must tell.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from tacit.columns import LazyColumn, columns_of, share_rows
from tacit.errors import NotPublic
from tacit.pytrees import flat_rows, tensors_of
from tacit.records import Records

_ROWS_TO_COMPARE = 64
_CHUNK = 1 << 23  # entries at once
_MOST_BYTES_READ = 1 << 30
_ROUNDING = 1e-10  # of a sum in float64, with much to spare


def require_public(public: Records, private: Records) -> None:
    """Raise NotPublic if `public` is, or was copied from, the private records.

    Refused are: the same memory; one name with record ids in common, which is how `split_public`
    numbers the two sides; and copies, where most of the compared rows equal a private row.
    """
    if len(public) == 0:
        raise NotPublic(f"the public set {public.name!r} is empty; give it records")
    remedy = "hold public records out before training, with split_public(records, share)"
    if any(
        _same_memory(a, b) for a, b in product(*map(tensors_of, (public.inputs, private.inputs)))
    ):
        raise NotPublic(f"the public set {public.name!r} is private data itself; {remedy}")
    common = torch.isin(public.record_ids.cpu(), private.record_ids.cpu())
    if public.name == private.name and bool(common.any()):
        raise NotPublic(
            f"the public set and the private records are both {public.name!r} and have record ids "
            f"in common; {remedy}"
        )
    if share_among(public, private) > 0.5:
        raise NotPublic(
            f"most records of the public set {public.name!r} are among the private ones; {remedy}"
        )


def require_held_out(evaluated: Records, private: Records) -> None:
    """Raise NotPublic if the records to evaluate on are, or were copied from, the private ones.

    Refused are one row of memory in common, and copies: of up to 64 rows from all over
    `evaluated`, most equal a private record, input and target.
    """
    if len(evaluated) == 0 or len(private) == 0:
        return
    remedy = (
        "their accuracy would be released without noise; give records that were held out, or "
        "evaluate_on=tacit.Unprotected(records) where epsilon need not cover it"
    )
    pairs = product(tensors_of(evaluated.inputs), tensors_of(private.inputs))
    if any(_same_memory(a, b) and _rows_in_common(a, b) for a, b in pairs):
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


def _same_memory(a: Tensor, b: Tensor) -> bool:
    if isinstance(a, LazyColumn) or isinstance(b, LazyColumn):
        return isinstance(a, LazyColumn) and isinstance(b, LazyColumn) and share_rows(a, b)
    # A row that every record shares, such as a mask of ones, is no record's own.
    if a.stride(0) == 0 or b.stride(0) == 0 or len(b) == 0 or a.device != b.device:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _rows_in_common(a: Tensor, b: Tensor) -> bool:
    """Whether a row of `a` begins where a row of `b` does, in one memory or source."""
    if isinstance(a, LazyColumn):
        return True  # `_same_memory` has compared the rows

    def places(rows: Tensor) -> Tensor:
        begin, stride = int(rows.storage_offset()), int(rows.stride(0))
        return (begin + torch.arange(len(rows)) * stride) * rows.element_size()

    return bool(torch.isin(places(a), places(b)).any())


def _mostly_copied(evaluated: Records, private: Records) -> bool:
    if evaluated.shape != private.shape or _too_large(private):
        return False
    private = private.read()
    some = evaluated.take(slice(None, None, -(-len(evaluated) // _ROWS_TO_COMPARE))).read()
    # Inputs alone first: to join them with their targets is to copy all private records.
    if share_among(*(replace(r, inputs=flat_rows(r.inputs)) for r in (some, private))) <= 0.5:
        return False
    shapes = ([t.shape[1:] for t in tensors_of(r.targets)] for r in (some, private))
    if next(shapes) != next(shapes):
        return True
    joined = (replace(r, inputs=flat_rows((r.inputs, r.targets))) for r in (some, private))
    return share_among(*joined) > 0.5


def _too_large(records: Records) -> bool:
    """Whether comparing with all of these records would read too much."""
    columns = columns_of((records.inputs, records.targets))
    return sum(c.numel() * c.element_size() for c in columns) > _MOST_BYTES_READ


def share_among(public: Records, private: Records) -> float:
    """The share of some public rows whose inputs equal those of a private row."""
    if public.shape != private.shape or len(private) == 0 or _too_large(private):
        return 0.0
    private_rows = flat_rows(private.read().inputs)
    stride = -(-len(public) // _ROWS_TO_COMPARE)  # from all over
    some = public.take(slice(None, None, stride)).read()
    public_rows = flat_rows(some.inputs).to(private_rows)
    width, device = private_rows.shape[1], private_rows.device
    if width == 0:
        return 0.0
    at_once = max(1, _CHUNK // width)
    # Rows that differ in one weighted sum differ; the others are compared in full.
    draws = torch.Generator().manual_seed(0)
    weights = torch.randn(width, generator=draws, dtype=torch.float64).to(device) / width

    def weighted_sums(rows: Tensor, weights: Tensor) -> Tensor:
        chunks = (torch.nan_to_num(c.double(), 0.0, 1e300, -1e300) for c in rows.split(at_once))
        return torch.cat([chunk @ weights for chunk in chunks])

    def is_private(row: Tensor, candidates: Tensor) -> bool:
        places = candidates.nonzero().flatten().split(at_once)
        return any(bool((private_rows[at] == row).all(dim=1).any()) for at in places)

    private_sums = weighted_sums(private_rows, weights)
    sums = weighted_sums(public_rows, weights)
    slacks = _ROUNDING * weighted_sums(public_rows.double().abs(), weights.abs())
    copies = sum(
        is_private(row, (private_sums - of_row).abs() <= slack)
        for row, of_row, slack in zip(public_rows, sums, slacks, strict=True)
    )
    return copies / len(public_rows)
