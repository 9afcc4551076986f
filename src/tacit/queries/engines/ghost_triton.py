"""A GPU kernel for `ghost.norms_from_grams` of few positions: one launch instead of thirty.

A program holds both Gram matrices of one record (and group) and computes what is written there, in
the same order. Each of its sums is a chain within a thread and then a tree, of at most 64 + 12
roundings for 64 × 64 terms, which is within the `_CASCADE` that is allowed for.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None

_LARGEST = 64  # positions

if AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def _norms(  # type: ignore[no-untyped-def]
        a_gram,
        b_gram,
        norms,
        reaches,
        positions,
        least_a,
        least_b,
        least,
        of_terms,
        of_share,
        BLOCK: tl.constexpr,
    ):
        record = tl.program_id(0).to(tl.int64)
        t, u = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
        inside = (t < positions)[:, None] & (u < positions)[None, :]
        at = record * positions * positions + t[:, None] * positions + u[None, :]
        a = tl.load(a_gram + at, mask=inside, other=0.0)
        b = tl.load(b_gram + at, mask=inside, other=0.0)
        diagonal = record * positions * positions + t * (positions + 1)
        own_a = tl.load(a_gram + diagonal, mask=t < positions, other=0.0)
        own_b = tl.load(b_gram + diagonal, mask=t < positions, other=0.0)
        # `where` and not a maximum, which might drop a NaN: such a record must be found out.
        own_a, own_b = tl.where(own_a < 0, 0.0, own_a), tl.where(own_b < 0, 0.0, own_b)
        length_a = tl.where(t < positions, tl.sqrt_rn(own_a + least_a), 0.0)
        length_b = tl.where(t < positions, tl.sqrt_rn(own_b + least_b), 0.0)
        reach = tl.sum(length_a * length_b)
        all_a, all_b = tl.sum(length_a), tl.sum(length_b)
        vanished = least_a * (all_b * all_b) + least_b * (all_a * all_a)
        squares = tl.sum(a * b) + (vanished + least * (positions * positions))
        squares = tl.where(squares < 0, 0.0, squares)
        upper = tl.sqrt_rn(squares + of_terms * (reach * reach)) + of_share * reach
        tl.store(norms + record, upper * upper)
        tl.store(reaches + record, reach)


def fits(a: Tensor) -> bool:
    """Float32 on a GPU, of few positions."""
    return AVAILABLE and a.is_cuda and a.dtype == torch.float32 and 0 < a.shape[-1] <= _LARGEST


def norms(a: Tensor, b: Tensor, widths: tuple[int, int], depth: int) -> tuple[Tensor, Tensor]:
    """(√(‖g‖² + depth·u·S²) + T·u·S)² and S, from (…, T, T) inner products of both sides."""
    a, b = a.contiguous(), b.contiguous()
    positions = a.shape[-1]
    found, reach = a.new_empty(a.shape[:-2]), a.new_empty(a.shape[:-2])
    if not found.numel():
        return found, reach
    unit, tiny = torch.finfo(a.dtype).eps / 2, torch.finfo(a.dtype).tiny
    least = [tiny * width for width in widths]
    _norms[(found.numel(),)](
        a,
        b,
        found,
        reach,
        positions,
        *least,
        tiny,
        depth * unit,
        positions * unit,
        BLOCK=max(16, triton.next_power_of_2(positions)),
        num_warps=4,
    )
    return found, reach
