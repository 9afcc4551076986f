"""A public set is one that the guarantee does not cover: it must not hold private records."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from tacit.data.records import Records
from tacit.errors import NotPublic
from tacit.pytrees import Tree, flat_rows, tensors_of

_ROWS_TO_COMPARE = 64
_CHUNK = 1 << 23  # entries at once
_ROUNDING = 1e-10  # of a sum in float64, with much to spare


def require_public(public: Records, private: Records) -> None:
    """Raise NotPublic if `public` is, or was copied from, the private records.

    What is computed from a public set goes out without noise, so a private record in it would be
    released as it is. Refused are: the same memory; one name with record ids in common, which is
    how `split_public` numbers the two sides; and copies, where most of the rows that are compared
    are found among the private ones. A few equal rows pass: datasets have duplicates.
    """
    if len(public) == 0:
        raise NotPublic(f"the public set {public.name!r} is empty; give it records")
    remedy = "hold public records out before training, with split_public(records, share)"
    if _shares_memory(public.inputs, private.inputs):
        raise NotPublic(f"the public set {public.name!r} is private data itself; {remedy}")
    if public.name == private.name and _ids_meet(public, private):
        raise NotPublic(
            f"the public set and the private records are both {public.name!r} and have record ids "
            f"in common; {remedy}"
        )
    if found_among(public, private) > 0.5:
        raise NotPublic(
            f"most records of the public set {public.name!r} are among the private ones; {remedy}"
        )


def _shares_memory(public: Tree, private: Tree) -> bool:
    return any(
        a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        for a, b in product(tensors_of(public), tensors_of(private))
        # One row for everybody, such as a mask of ones, is nobody's own.
        if len(b) and a.stride(0) and b.stride(0)
    )


def _ids_meet(public: Records, private: Records) -> bool:
    return bool(torch.isin(public.record_ids.cpu(), private.record_ids.cpu()).any())


def found_among(public: Records, private: Records) -> float:
    """The share of some public rows that equal a private row, input for input."""
    if public.shape != private.shape or len(private) == 0:
        return 0.0
    stride = -(-len(public) // _ROWS_TO_COMPARE)  # from all over
    held = flat_rows(private.inputs)
    some = flat_rows(public.take(slice(None, None, stride)).inputs).to(held)
    if held.shape[1] == 0:
        return 0.0
    # Where one number of two rows differs, so do the rows; the others are compared in full.
    draws = torch.Generator().manual_seed(0)
    weights = torch.randn(held.shape[1], generator=draws, dtype=torch.float64).to(held.device)
    numbers = _one_number(held, weights)
    slacks = _ROUNDING * _one_number(some.double().abs(), weights.abs())
    found = 0
    for row, wanted, slack in zip(some, _one_number(some, weights), slacks, strict=True):
        found += _is_among(row, held, (numbers - wanted).abs() <= slack)
    return found / len(some)


def _one_number(rows: Tensor, weights: Tensor) -> Tensor:
    """A combination of each row's entries, in float64; what is not finite counts as a number."""
    chunks = (
        torch.nan_to_num(chunk.double(), 0.0, 1e300, -1e300) @ (weights / len(weights))
        for chunk in rows.split(_rows_at_once(rows))
    )
    return torch.cat(list(chunks))


def _rows_at_once(rows: Tensor) -> int:
    return max(1, _CHUNK // rows.shape[1])


def _is_among(row: Tensor, held: Tensor, candidates: Tensor) -> bool:
    places = candidates.nonzero().flatten()
    return any(
        bool((held[some] == row).all(dim=1).any()) for some in places.split(_rows_at_once(held))
    )
