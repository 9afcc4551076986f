"""GPU operators for ghost norms: inner products with all digits, and norms from Gram matrices.

`gram_norms` computes the formula of `norms.norms_from_grams` for few positions in one launch
instead of thirty. A program holds both Gram matrices of one record (and group) and computes what is
written there, in the same order. Each of its sums is a chain within a thread and then a tree, of at
most 64 + 12 roundings for 64 × 64 terms, which is within what `norms.sum_depth` allows for.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from tacit.engines.kernels import for_compiler
from tacit.tensor_float import all_digits

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
        # `where` and not a maximum, which might drop a NaN: such a record must be noticed.
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


def fits(a_BTT: Tensor) -> bool:
    """Float32 on a GPU, with few positions."""
    small = 0 < a_BTT.shape[-1] <= _LARGEST and not for_compiler()
    return AVAILABLE and a_BTT.is_cuda and a_BTT.dtype == torch.float32 and small


@torch.library.custom_op(
    "tacit::gram_norms",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor a, Tensor b, int width_a, int width_b, int depth) -> (Tensor, Tensor)",
)
def gram_norms(
    a: Tensor, b: Tensor, width_a: int, width_b: int, depth: int
) -> tuple[Tensor, Tensor]:
    """(√(‖g‖² + depth·u·S²) + T·u·S)² and S, from (…, T, T) inner products of both sides."""
    a, b = a.contiguous(), b.contiguous()
    positions = a.shape[-1]
    found, reach = a.new_empty(a.shape[:-2]), a.new_empty(a.shape[:-2])
    if not found.numel():
        return found, reach
    unit, tiny = torch.finfo(a.dtype).eps / 2, torch.finfo(a.dtype).tiny
    _norms[(found.numel(),)](
        a,
        b,
        found,
        reach,
        positions,
        tiny * width_a,
        tiny * width_b,
        tiny,
        depth * unit,
        positions * unit,
        BLOCK=max(16, triton.next_power_of_2(positions)),
        num_warps=4,
    )
    return found, reach


@gram_norms.register_fake
def _(a: Tensor, b: Tensor, width_a: int, width_b: int, depth: int) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape[:-2]), a.new_empty(a.shape[:-2])


@torch.library.custom_op(
    "tacit::inner_products",
    mutates_args=(),
    schema="(Tensor x_BTD, Tensor y_BSD, int block) -> Tensor",
)
def inner_products(x_BTD: Tensor, y_BSD: Tensor, block: int) -> Tensor:
    """x_t·y_s with all digits of float32, whatever the setting for TensorFloat-32.

    An operator, because the setting that holds when a step is traced is not part of the trace.
    """
    (x, *xs), (y, *ys) = x_BTD.split(block, dim=-1), y_BSD.split(block, dim=-1)
    with all_digits():
        total = torch.bmm(x, y.transpose(1, 2))
        for x, y in zip(xs, ys, strict=True):
            total.baddbmm_(x, y.transpose(1, 2))
    return total


@inner_products.register_fake
def _(x_BTD: Tensor, y_BSD: Tensor, block: int) -> Tensor:
    return x_BTD.new_empty(x_BTD.shape[0], x_BTD.shape[1], y_BSD.shape[1])
