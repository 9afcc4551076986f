"""GPU operators for ghost norms: ‖Σ_t b_t a_tᵀ‖² = Σ_{t,u} (a_t·a_u)(b_t·b_u), from above.

A program makes one tile of both Gram matrices of one record, multiplies them and adds the products
up, so no matrix of T × T numbers is ever written. Both are symmetric: tiles below the diagonal are
left out and those above it count twice.

**Rounding**, in the terms of `products`. Matrix units multiply factors of TensorFloat-32. Each
float32 number x is split into a part x' of 10 bits and a rest of which 10 bits are kept; three of
the four products of parts are added. What is dropped is at most 3·2⁻²⁰·|x·y| = 48·u·|x·y|. Products
are exact; additions may cut instead of round, at the size of the largest term [Fasi 2021, for such
units in general], so each is taken for four roundings. Sums of 32 products are added up with
compensation [Kahan 1965], which rounds each twice however many there are. So a product meets 4·32 +
48 + 4 roundings (`_DEPTH`), whatever the width. Products of the two Gram matrices and their sum are
float64: they add nothing to that, and no product vanishes. A factor below the least normal number τ
may count as zero: a_t·a_u loses up to √D·τ·(‖a_t‖ + ‖a_u‖), besides the D·τ of products that
vanish.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from tacit.precision import ieee_float32

AVAILABLE = importlib.util.find_spec("triton") is not None

_PRODUCTS = 32  # that matrix units add up at once
_DEPTH = 4 * _PRODUCTS + 48 + 4  # roundings that a product meets in an inner product

if AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def _read(x, t, d, positions, width, stride_t, stride_d):  # type: ignore[no-untyped-def]
        """Entries d of the vectors at positions t, as (d, t); zeros outside."""
        inside = (d < width)[:, None] & (t < positions)[None, :]
        at = t[None, :] * stride_t + d[:, None] * stride_d
        return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def _tile(  # type: ignore[no-untyped-def]
        x,
        t,
        u,
        positions,
        width,
        stride_t,
        stride_d,
        BLOCK_T: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        """x_t·x_u for one tile of positions: sums of BLOCK_D products, added with compensation."""
        total = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
        lost = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
        for start in range(0, width, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            left = _read(x, t, d, positions, width, stride_t, stride_d)
            right = _read(x, u, d, positions, width, stride_t, stride_d)
            part = tl.dot(tl.trans(left), right, input_precision="tf32x3") - lost
            larger = total + part
            lost = (larger - total) - part
            total = larger
        return total

    @triton.jit
    def _tiles(  # type: ignore[no-untyped-def]
        a,
        b,
        parts,
        positions,
        width_a,
        width_b,
        record_a,
        stride_ta,
        stride_da,
        record_b,
        stride_tb,
        stride_db,
        least_a,
        least_b,
        across,
        num_tiles,
        BLOCK_T: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        """One tile of one record: Σ (a_t·a_u)(b_t·b_u), S, Σ ‖a_t‖ and Σ ‖b_t‖."""
        record = (tl.program_id(0) // num_tiles).to(tl.int64)
        tile = tl.program_id(0) % num_tiles
        top, left = 0, tile
        while left >= across - top:  # row after row of the upper triangle
            left -= across - top
            top += 1
        left += top
        t = top * BLOCK_T + tl.arange(0, BLOCK_T)
        u = left * BLOCK_T + tl.arange(0, BLOCK_T)
        a += record * record_a
        b += record * record_b
        gram_a = _tile(a, t, u, positions, width_a, stride_ta, stride_da, BLOCK_T, BLOCK_D)
        gram_b = _tile(b, t, u, positions, width_b, stride_tb, stride_db, BLOCK_T, BLOCK_D)
        products = gram_a.to(tl.float64) * gram_b.to(tl.float64)
        weight = tl.where(top == left, 1.0, 2.0).to(tl.float64)
        own = (tl.arange(0, BLOCK_T)[:, None] == tl.arange(0, BLOCK_T)[None, :]) & (top == left)
        own_a = tl.sum(tl.where(own, gram_a, 0.0), axis=1).to(tl.float64)
        own_b = tl.sum(tl.where(own, gram_b, 0.0), axis=1).to(tl.float64)
        # `where` and not a maximum, which might drop a NaN: such a record must be noticed.
        own_a, own_b = tl.where(own_a < 0, 0.0, own_a), tl.where(own_b < 0, 0.0, own_b)
        counts = (t < positions) & (top == left)
        length_a = tl.where(counts, tl.sqrt(own_a + least_a), 0.0)
        length_b = tl.where(counts, tl.sqrt(own_b + least_b), 0.0)
        to = parts + record * 4 * num_tiles + tile
        tl.store(to, weight * tl.sum(tl.sum(products, axis=1), axis=0))
        tl.store(to + num_tiles, tl.sum(length_a * length_b, axis=0))
        tl.store(to + 2 * num_tiles, tl.sum(length_a, axis=0))
        tl.store(to + 3 * num_tiles, tl.sum(length_b, axis=0))

    @triton.jit
    def _finish(  # type: ignore[no-untyped-def]
        parts,
        norms,
        reaches,
        num_tiles,
        positions,
        width_a,
        width_b,
        tiny,
        depth,
        unit,
        BLOCK: tl.constexpr,
    ):
        """The norm from above and the reach of one record."""
        record = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        base = parts + record * 4 * num_tiles
        found, reach = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        all_a, all_b = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        for start in range(0, num_tiles, BLOCK):
            here = start + at < num_tiles
            found += tl.load(base + start + at, mask=here, other=0.0)
            reach += tl.load(base + num_tiles + start + at, mask=here, other=0.0)
            all_a += tl.load(base + 2 * num_tiles + start + at, mask=here, other=0.0)
            all_b += tl.load(base + 3 * num_tiles + start + at, mask=here, other=0.0)
        s = tl.sum(reach, axis=0) * (1 + depth * unit)
        sum_a, sum_b = tl.sum(all_a, axis=0), tl.sum(all_b, axis=0)
        vanished = width_a * sum_b * sum_b + width_b * sum_a * sum_a
        cut = tl.sqrt(width_a) * sum_b + tl.sqrt(width_b) * sum_a
        square = tl.sum(found, axis=0)
        square = tl.where(square < 0, 0.0, square) + tiny * (vanished + 2 * s * cut)
        upper = tl.sqrt(square + depth * unit * s * s) + positions * unit * s
        larger = 1 + 4 * unit  # what is written has float32's digits
        tl.store(norms + record, (upper * upper * larger).to(tl.float32))
        tl.store(reaches + record, (s * larger).to(tl.float32))


def fits(x: Tensor) -> bool:
    """Float32 on a GPU."""
    return AVAILABLE and x.is_cuda and x.dtype == torch.float32


@torch.library.custom_op(
    "tacit::ghost_norms",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor a_BTD, Tensor b_BTP) -> (Tensor, Tensor)",
)
def ghost_norms(a_BTD: Tensor, b_BTP: Tensor) -> tuple[Tensor, Tensor]:
    """‖Σ_t b_t a_tᵀ‖² from above, and the reach S = Σ_t ‖a_t‖‖b_t‖, of each record."""
    return launch(a_BTD, b_BTP)


@ghost_norms.register_fake
def _(a_BTD: Tensor, b_BTP: Tensor) -> tuple[Tensor, Tensor]:
    return a_BTD.new_empty(len(a_BTD)), a_BTD.new_empty(len(a_BTD))


def launch(a_BTD: Tensor, b_BTP: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles, and then their sums."""
    batch, positions, width_a = a_BTD.shape
    width_b = b_BTP.shape[2]
    norms, reach = a_BTD.new_zeros(batch), a_BTD.new_zeros(batch)
    if not batch or not positions:
        return norms, reach
    block = 16 if positions <= 16 else 32  # larger ones were slower on an H200
    across = math.ceil(positions / block)
    num_tiles = across * (across + 1) // 2
    parts = torch.empty((batch, 4, num_tiles), dtype=torch.float64, device=a_BTD.device)
    finfo = torch.finfo(torch.float32)
    _tiles[(batch * num_tiles,)](
        *(a_BTD, b_BTP, parts, positions, width_a, width_b, *a_BTD.stride(), *b_BTP.stride()),
        *(finfo.tiny * width_a, finfo.tiny * width_b, across, num_tiles),
        BLOCK_T=block,
        BLOCK_D=_PRODUCTS,
        num_warps=2,
        num_stages=3,
    )
    _finish[(batch,)](
        *(parts, norms, reach, num_tiles, positions, float(width_a), float(width_b)),
        *(finfo.tiny, 2 * _DEPTH, finfo.eps / 2),
        BLOCK=min(256, triton.next_power_of_2(num_tiles)),
        num_warps=1,
    )
    return norms, reach


@torch.library.custom_op(
    "tacit::inner_products",
    mutates_args=(),
    schema="(Tensor x_BTD, Tensor y_BSD, int block) -> Tensor",
)
def inner_products(x_BTD: Tensor, y_BSD: Tensor, block: int) -> Tensor:
    """x_t·y_s with all digits of float32, whatever the setting for TensorFloat-32.

    An operator, because the setting that holds when a step is traced is not part of the trace.
    """
    with ieee_float32():
        return sum_of_products(x_BTD, y_BSD, block)


@inner_products.register_fake
def _(x_BTD: Tensor, y_BSD: Tensor, block: int) -> Tensor:
    return x_BTD.new_empty(x_BTD.shape[0], x_BTD.shape[1], y_BSD.shape[1])


def sum_of_products(x_BTD: Tensor, y_BSD: Tensor, block: int) -> Tensor:
    """x_t·y_s, (B, T, S), from sums of `block` products each."""
    (x, *xs), (y, *ys) = x_BTD.split(block, dim=-1), y_BSD.split(block, dim=-1)
    total = torch.bmm(x, y.transpose(1, 2))
    for x, y in zip(xs, ys, strict=True):
        total = torch.baddbmm(total, x, y.transpose(1, 2))
    return total
