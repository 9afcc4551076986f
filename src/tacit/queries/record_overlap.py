"""Are some records, which should be public or held out, private records?

Values that are computed from public or held-out records are released without noise. So private
records among them would be released as they are, and are refused where that can be seen: by shared
rows of memory, by shared record ids, and by comparing the contents of some rows with those of all
private ones. A few equal rows pass, since datasets have duplicates. Of private records on disk that
take more than 1 GiB some rows are compared: the first, the last, and some from all over. That finds
a copy, a shuffled copy in memory, and what was cut off at either end; a small random part of them
goes unnoticed.

Ids tell records apart within one origin: those that somebody gave, under one name, or the row
numbers of one set of records and of what was taken from it. Two sets that were made separately
both have rows 0, 1, 2, …, and nothing follows from that; then contents alone decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from tacit.columns import LazyColumn, columns_of, share_rows
from tacit.errors import NotPublic
from tacit.pytrees import tensors_of
from tacit.records import Records

_ROWS_TO_COMPARE = 256
_ROWS_AT_AN_END = 64
_CHUNK = 1 << 20  # numbers at once, which stay in the cache
_MOST_BYTES_READ = 1 << 30
_NAN = 1.2345e-38  # what every NaN counts as
_SECRET = torch.Generator()
_SECRET.seed()  # from the operating system


def require_public(public: Records, private: Records) -> None:
    """Raise NotPublic if `public` is, or was copied from, the private records.

    Refused are: a row of the same memory; one name and origin with record ids in common, which is
    how `split_public` numbers the two sides; and copies, where most of up to 256 rows from all over
    `public` equal a private row.
    """
    if len(public) == 0:
        raise NotPublic(f"the public set {public.name!r} is empty; give it records")
    remedy = "hold public records out before training, with split_public(records, share)"
    if _rows_of_one_memory(public, private):
        raise NotPublic(f"the public set {public.name!r} is private data itself; {remedy}")
    common = torch.isin(public.record_ids.cpu(), private.record_ids.cpu())
    one_origin = (public.name, public.origin) == (private.name, private.origin)
    if one_origin and bool(common.any()):
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

    Refused are one row of memory in common, and copies: of up to 256 rows from all over
    `evaluated`, most equal a private record, input and target.
    """
    if len(evaluated) == 0 or len(private) == 0:
        return
    remedy = (
        "their accuracy would be released without noise; give records that were held out, or "
        "evaluate_on=tacit.Unprotected(records) where epsilon need not cover it"
    )
    if _rows_of_one_memory(evaluated, private):
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


def _rows_of_one_memory(some: Records, private: Records) -> bool:
    pairs = product(tensors_of(some.inputs), tensors_of(private.inputs))
    return any(_same_memory(a, b) and _rows_in_common(a, b) for a, b in pairs)


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
    if evaluated.shape != private.shape:
        return False
    shapes = ([t.shape[1:] for t in tensors_of(r.targets)] for r in (evaluated, private))
    # One input may be of two classes, so that equal inputs alone need not be one record.
    with_targets = next(shapes) == next(shapes)
    if _too_large(private):
        return _share_of_samples(evaluated, private, with_targets=with_targets) > 0.5
    return _share_of(_some(evaluated), private, with_targets=with_targets) > 0.5


def share_among(public: Records, private: Records) -> float:
    """The share of some public rows whose inputs equal those of a private row.

    Of private records that are too large to be read, the share of some that are public.
    """
    if public.shape != private.shape or len(private) == 0 or len(public) == 0:
        return 0.0
    if _too_large(private):
        return _share_of_samples(public, private, with_targets=False)
    return _share_of(_some(public), private, with_targets=False)


def _some(records: Records) -> Records:
    """At most `_ROWS_TO_COMPARE` rows from all over."""
    return records.take(slice(None, None, -(-len(records) // _ROWS_TO_COMPARE))).read()


def _too_large(records: Records) -> bool:
    """Whether comparing with all of these records would read too much from disk."""
    columns = columns_of((records.inputs, records.targets))
    return sum(c.numel() * c.element_size() for c in columns) > _MOST_BYTES_READ


def _share_of_samples(some: Records, private: Records, *, with_targets: bool) -> float:
    """The largest share that `some` has of three samples of the private rows.

    Which rows they are depends on the number of rows alone. What is in memory is looked through,
    and of what is read lazily the rows in the same places and some of its own.
    """
    samples = _samples(len(private))
    if some.is_lazy:
        places = torch.cat([*samples, *_samples(len(some))]).unique()
        some = some.take(places[places < len(some)])
    keys: dict[int, Tensor] = {}
    known = torch.cat([*_fingerprints(some, with_targets, keys)])
    shares = [
        torch.isin(torch.cat([*_fingerprints(private.take(rows), with_targets, keys)]), known)
        for rows in samples
    ]
    return max(float(found.double().mean()) for found in shares)


def _samples(count: int) -> list[Tensor]:
    """The first rows, the last, and some from all over."""
    rows = torch.arange(count)
    return [rows[:_ROWS_AT_AN_END], rows[-_ROWS_AT_AN_END:], rows[:: -(-count // 128)]]


def _share_of(some: Records, private: Records, *, with_targets: bool) -> float:
    """The share of the rows of `some` whose fingerprint a private row has."""
    keys: dict[int, Tensor] = {}
    wanted = torch.cat([*_fingerprints(some, with_targets, keys)])
    if len(wanted) == 0:
        return 0.0
    found = torch.zeros(len(wanted), dtype=torch.bool)
    for piece in _fingerprints(private, with_targets, keys):
        found |= torch.isin(wanted, piece)
        if bool(found.all()):
            break
    return float(found.double().mean())


def _fingerprints(
    records: Records, with_targets: bool, keys: dict[int, Tensor]
) -> Iterator[Tensor]:
    """64 bits for each row, piece by piece, so that records which are read lazily stay on disk.

    Σ_j k_j·x_j mod 2⁶⁴ over the bits x of the row as float32, with odd random keys k that live for
    one comparison. Rows that differ agree with probability 2⁻³² or less [Lemire and Kaser 2014,
    multilinear hashing]. It does not depend on the type in which equal numbers are stored; every
    NaN is one number, and so are 0 and −0.
    """
    width = sum(t[:1].numel() for t in tensors_of(records.take(slice(1)).inputs))
    if width == 0:
        return
    at_once = max(1, _CHUNK // width)
    for start in range(0, len(records), at_once):
        piece = records.take(slice(start, start + at_once)).read()
        tensors = tensors_of(piece.inputs) + (tensors_of(piece.targets) if with_targets else [])
        total = torch.zeros(len(tensors[0]), dtype=torch.int64, device=tensors[0].device)
        for place, column in enumerate(tensors):
            rows = column.detach().reshape(len(column), -1)
            if rows.is_complex():
                rows = torch.view_as_real(rows.resolve_conj()).flatten(1)
            bits = (torch.nan_to_num(rows.float(), _NAN, torch.inf, -torch.inf) + 0.0).view(
                torch.int32
            )
            # Copies of one set may differ in width where they are no copies at all.
            key = keys.get(place)
            if key is None or len(key) != bits.shape[1]:
                key = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=_SECRET) * 2 + 1
                keys[place] = key
            # Whole numbers wrap around, so that the order of the sum does not matter.
            total += (bits.long() * key.to(bits.device)).sum(dim=1)
        yield total.cpu()
