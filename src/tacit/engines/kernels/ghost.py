"""GPU operators for ghost norms: ‖Σ_t b_t a_tᵀ‖² = Σ_{t,u} (a_t·a_u)(b_t·b_u), from above.

A program makes one tile of both Gram matrices of one record, multiplies them and adds the products
up, so no matrix of T × T numbers is ever written. Both are symmetric: tiles below the diagonal are
left out and those above it count twice. Windows of a convolution are read in place.

**Rounding**, in the terms of `norms`. Matrix units multiply factors of TensorFloat-32. Each float32
number x is split into a part x' of 10 bits and a rest of which 10 bits are kept; three of the four
products of parts are added. What is dropped is at most 3·2⁻²⁰·|x·y| = 48·u·|x·y|. Products are
exact; additions may cut instead of round, at the size of the largest term [Fasi 2021, for such
units in general], so each is taken for four roundings. Sums of 32 products are added up with
compensation [Kahan 1965], which rounds each twice however many there are. So a product meets
4·32 + 48 + 4 roundings (`_DEPTH`), whatever the width. Products of the two Gram matrices and their
sum are float64: they add nothing to that, and no product vanishes. A factor below the least normal
number τ may count as zero: a_t·a_u loses up to √D·τ·(‖a_t‖ + ‖a_u‖), besides the D·τ of products
that vanish.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tacit.tensor_float import all_digits

AVAILABLE = importlib.util.find_spec("triton") is not None

_PRODUCTS = 32  # that matrix units add up at once
_DEPTH = 4 * _PRODUCTS + 48 + 4  # roundings that a product meets in an inner product

if AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def _read(  # type: ignore[no-untyped-def]
        x,
        t,
        d,
        positions,
        width,
        stride_t,
        stride_d,
        channels,
        height,
        length,
        out_length,
        stride_h,
        stride_w,
        pad_h,
        pad_w,
        dilation_h,
        dilation_w,
        KERNEL_W: tl.constexpr,
        WINDOWS: tl.constexpr,
    ):
        """Entries d of the vectors at positions t, as (d, t); zeros outside."""
        inside = (d < width)[:, None] & (t < positions)[None, :]
        if WINDOWS:
            channel, place = d % channels, d // channels
            down, along = (
                place // KERNEL_W * dilation_h - pad_h,
                place % KERNEL_W * dilation_w - pad_w,
            )
            row = (t // out_length * stride_h)[None, :] + down[:, None]
            column = (t % out_length * stride_w)[None, :] + along[:, None]
            inside = inside & (row >= 0) & (row < height) & (column >= 0) & (column < length)
            at = channel[:, None] * (height * length) + row * length + column
        else:
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
        channels,
        height,
        length,
        out_length,
        stride_h,
        stride_w,
        pad_h,
        pad_w,
        dilation_h,
        dilation_w,
        KERNEL_W: tl.constexpr,
        WINDOWS: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        """x_t·x_u for one tile of positions: sums of BLOCK_D products, added with compensation."""
        total = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
        lost = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
        for start in range(0, width, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            left = _read(
                x, t, d, positions, width, stride_t, stride_d, channels, height, length,
                out_length, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
                KERNEL_W, WINDOWS,
            )  # fmt: skip
            right = _read(
                x, u, d, positions, width, stride_t, stride_d, channels, height, length,
                out_length, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
                KERNEL_W, WINDOWS,
            )  # fmt: skip
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
        groups,
        positions,
        width_a,
        width_b,
        record_a,
        group_a,
        stride_ta,
        stride_da,
        record_b,
        group_b,
        stride_tb,
        stride_db,
        least_a,
        least_b,
        across,
        num_tiles,
        channels,
        height,
        length,
        out_length,
        stride_h,
        stride_w,
        pad_h,
        pad_w,
        dilation_h,
        dilation_w,
        KERNEL_W: tl.constexpr,
        WINDOWS: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        """One tile of one record and group: Σ (a_t·a_u)(b_t·b_u), S, Σ ‖a_t‖ and Σ ‖b_t‖."""
        which = (tl.program_id(0) // num_tiles).to(tl.int64)
        tile = tl.program_id(0) % num_tiles
        top, left = 0, tile
        while left >= across - top:  # row after row of the upper triangle
            left -= across - top
            top += 1
        left += top
        t = top * BLOCK_T + tl.arange(0, BLOCK_T)
        u = left * BLOCK_T + tl.arange(0, BLOCK_T)
        a += which // groups * record_a + which % groups * group_a
        b += which // groups * record_b + which % groups * group_b
        gram_a = _tile(
            a, t, u, positions, width_a, stride_ta, stride_da, channels, height, length,
            out_length, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
            KERNEL_W, WINDOWS, BLOCK_T, BLOCK_D,
        )  # fmt: skip
        gram_b = _tile(
            b, t, u, positions, width_b, stride_tb, stride_db, channels, height, length,
            out_length, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
            KERNEL_W, False, BLOCK_T, BLOCK_D,
        )  # fmt: skip
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
        to = parts + which * 4 * num_tiles + tile
        tl.store(to, weight * tl.sum(tl.sum(products, axis=1), axis=0))
        tl.store(to + num_tiles, tl.sum(length_a * length_b, axis=0))
        tl.store(to + 2 * num_tiles, tl.sum(length_a, axis=0))
        tl.store(to + 3 * num_tiles, tl.sum(length_b, axis=0))

    @triton.jit
    def _finish(  # type: ignore[no-untyped-def]
        parts,
        norms,
        reaches,
        groups,
        num_tiles,
        positions,
        width_a,
        width_b,
        tiny,
        depth,
        unit,
        BLOCK: tl.constexpr,
    ):
        """The norm from above and the reach of one record, whose groups' squares add up."""
        record = tl.program_id(0).to(tl.int64)
        squares, reaches_all = tl.zeros((1,), tl.float64), tl.zeros((1,), tl.float64)
        at = tl.arange(0, BLOCK)
        for group in range(groups):
            base = parts + (record * groups + group) * 4 * num_tiles
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
            squares += upper * upper
            reaches_all += s
        larger = 1 + 4 * unit  # what is written has float32's digits
        one = tl.arange(0, 1)
        tl.store(norms + record + one, (squares * larger).to(tl.float32))
        tl.store(reaches + record + one, (reaches_all * larger).to(tl.float32))


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
    batch, positions, width_a = a_BTD.shape
    sides = []
    for x in (a_BTD, b_BTP):
        record, by_position, by_entry = x.stride()
        sides += [record, 0, by_position, by_entry]
    window = dict.fromkeys(_WINDOW, 1)
    return _launch(a_BTD, b_BTP, batch, 1, positions, width_a, b_BTP.shape[2], sides, window, 0)


@torch.library.custom_op(
    "tacit::convolution_ghost_norms",
    mutates_args=(),
    device_types="cuda",
    schema=(
        "(Tensor inputs, Tensor cotangent, int[] kernel_size, int[] stride, int[] padding, "
        "int[] dilation, int groups) -> (Tensor, Tensor)"
    ),
)
def convolution_ghost_norms(
    inputs: Tensor,
    cotangent: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """The same for a convolution's kernel, whose a_t are the windows of (B, C, …) inputs."""
    return launch_windows(inputs, cotangent, kernel_size, stride, padding, dilation, groups)


@convolution_ghost_norms.register_fake
def _(
    inputs: Tensor,
    cotangent: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    return inputs.new_empty(len(inputs)), inputs.new_empty(len(inputs))


def launch_windows(
    inputs: Tensor,
    cotangent: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """A 1-D convolution is a 2-D one of height 1; inputs are zero-padded inside the kernel."""
    if len(kernel_size) == 1:
        inputs, cotangent = inputs.unsqueeze(2), cotangent.unsqueeze(2)
        kernel_size, padding = (1, *kernel_size), (0, *padding)
        stride, dilation = (1, *stride), (1, *dilation)
    inputs, cotangent = inputs.contiguous(), cotangent.contiguous()
    batch, all_channels, height, length = inputs.shape
    all_filters, out_height, out_length = cotangent.shape[1:]
    channels, filters, positions = (
        all_channels // groups,
        all_filters // groups,
        out_height * out_length,
    )
    pixels = height * length
    sides = [all_channels * pixels, channels * pixels, 0, 0]
    sides += [all_filters * positions, filters * positions, 1, positions]
    sizes = (channels, height, length, out_length, *stride, *padding, *dilation)
    window = dict(zip(_WINDOW, map(int, sizes), strict=True))
    width = channels * math.prod(kernel_size)
    return _launch(
        inputs, cotangent, batch, groups, positions, width, filters, sides, window, kernel_size[1]
    )


_WINDOW = (
    *("channels", "height", "length", "out_length", "stride_h", "stride_w"),
    *("pad_h", "pad_w", "dilation_h", "dilation_w"),
)


def _launch(
    a: Tensor,
    b: Tensor,
    batch: int,
    groups: int,
    positions: int,
    width_a: int,
    width_b: int,
    sides: Sequence[int],
    window: dict[str, int],
    kernel_w: int,
) -> tuple[Tensor, Tensor]:
    """Tiles, and then their sums; `kernel_w` is 0 where a has no windows."""
    norms, reach = a.new_zeros(batch), a.new_zeros(batch)
    if not batch or not positions:
        return norms, reach
    block = _block(positions)
    across = math.ceil(positions / block)
    num_tiles = across * (across + 1) // 2
    parts = torch.empty((batch * groups, 4, num_tiles), dtype=torch.float64, device=a.device)
    finfo = torch.finfo(torch.float32)
    record_a, group_a, stride_ta, stride_da, record_b, group_b, stride_tb, stride_db = sides
    settings: dict[str, Any] = {
        "KERNEL_W": max(1, kernel_w),
        "WINDOWS": kernel_w > 0,
        "BLOCK_T": block,
        "BLOCK_D": _PRODUCTS,
        "num_warps": 2,
        "num_stages": 3,
    }
    _tiles[(batch * groups * num_tiles,)](
        *(a, b, parts, groups, positions, width_a, width_b),
        *(record_a, group_a, stride_ta, stride_da, record_b, group_b, stride_tb, stride_db),
        *(finfo.tiny * width_a, finfo.tiny * width_b, across, num_tiles),
        *window.values(),
        **settings,
    )
    _finish[(batch,)](
        *(parts, norms, reach, groups, num_tiles, positions),
        *(float(width_a), float(width_b), finfo.tiny),
        *(2 * _DEPTH, finfo.eps / 2),
        BLOCK=min(256, triton.next_power_of_2(num_tiles)),
        num_warps=1,
    )
    return norms, reach


def _block(positions: int) -> int:
    """Positions along one side of a tile. Larger ones were slower on an H200."""
    return 16 if positions <= 16 else 32


def entries(positions: int) -> int:
    """How many entries of each Gram matrix are made for a record."""
    across = math.ceil(positions / _block(positions))
    return across * (across + 1) // 2 * _block(positions) ** 2


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
