"""A GPU kernel for one convolution's per-record weight gradients, without unfolding windows.

For record i, output channel p and window entry w = (c, k): G_i[p, w] = Σ_t b_i[p, t]·a_i[c, t∘k], a
matrix product whose second factor is read from the input by index, so that nothing nine times the
size of the input is ever written. The same pass sums the squares of what it computed, so the norm
is of the very numbers that are stored. Float32, with TensorFloat-32 where convolutions use it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None

if AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def _weight_gradients(  # type: ignore[no-untyped-def]
        inputs,
        cotangent,
        rows,
        squares,
        channels,
        height,
        width,
        filters,
        out_width,
        positions,
        window,
        stride_h,
        stride_w,
        pad_h,
        pad_w,
        dilation_h,
        dilation_w,
        tiles_across,
        num_tiles,
        KERNEL_W: tl.constexpr,
        KERNEL: tl.constexpr,
        STORE: tl.constexpr,
        PRECISION: tl.constexpr,
        BLOCK_P: tl.constexpr,
        BLOCK_W: tl.constexpr,
        BLOCK_T: tl.constexpr,
    ):
        record = tl.program_id(0).to(tl.int64)
        tile = tl.program_id(1)
        p = (tile // tiles_across) * BLOCK_P + tl.arange(0, BLOCK_P)
        w = (tile % tiles_across) * BLOCK_W + tl.arange(0, BLOCK_W)
        channel = w // KERNEL
        k_h = (w % KERNEL) // KERNEL_W
        k_w = (w % KERNEL) % KERNEL_W
        a_at = inputs + record * channels * height * width
        b_at = cotangent + record * filters * positions
        total = tl.zeros((BLOCK_P, BLOCK_W), dtype=tl.float32)
        for start in range(0, positions, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            b = tl.load(
                b_at + p[:, None] * positions + t[None, :],
                mask=(p[:, None] < filters) & (t[None, :] < positions),
                other=0.0,
            )
            # Along t the input lies in one line, so t is the axis that neighbouring threads read.
            y = (t // out_width)[None, :] * stride_h + k_h[:, None] * dilation_h - pad_h
            x = (t % out_width)[None, :] * stride_w + k_w[:, None] * dilation_w - pad_w
            inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
            a = tl.load(
                a_at + channel[:, None] * height * width + y * width + x,
                mask=inside & (t[None, :] < positions) & (w[:, None] < window),
                other=0.0,
            )
            total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
        if STORE:
            at = rows + record * filters * window + p[:, None] * window + w[None, :]
            tl.store(at, total, mask=(p[:, None] < filters) & (w[None, :] < window))
        tl.store(squares + record * num_tiles + tile, tl.sum(total * total))


def weight_gradients(
    layer: Any, inputs: Tensor, cotangent: Tensor, *, store: bool
) -> tuple[Tensor | None, Tensor]:
    """(rows or None, squared norms) of each record; a 1-D convolution is a 2-D one of height 1.

    `inputs` are zero-padded by the layer's own padding inside the kernel.
    """
    dims = len(layer.kernel_size)
    one_row = dims == 1
    if one_row:
        inputs, cotangent = inputs.unsqueeze(2), cotangent.unsqueeze(2)

    def pair(values: Any, first: int) -> tuple[int, int]:
        return (first, int(values[0])) if one_row else (int(values[0]), int(values[1]))

    kernel, stride = pair(layer.kernel_size, 1), pair(layer.stride, 1)
    padding, dilation = pair(layer.padding, 0), pair(layer.dilation, 1)
    inputs, cotangent = inputs.contiguous(), cotangent.contiguous()
    batch, channels, height, width = inputs.shape
    filters, out_height, out_width = cotangent.shape[1:]
    positions, window = out_height * out_width, channels * kernel[0] * kernel[1]
    # Square tiles did best on an H200, over the layers of two networks of 32 to 256 filters.
    block_p = min(128, max(32, triton.next_power_of_2(filters)))
    block_w = 64 if block_p == 128 and positions < 256 else block_p
    block_t = 64 if block_p == 32 and positions >= 64 else 32
    tiles_across = triton.cdiv(window, block_w)
    num_tiles = tiles_across * triton.cdiv(filters, block_p)
    squares = inputs.new_empty(batch, num_tiles)
    rows = inputs.new_empty(batch, *layer.weight.shape) if store else None
    coarse = torch.backends.cudnn.allow_tf32
    _weight_gradients[(batch, num_tiles)](
        inputs,
        cotangent,
        rows if store else squares,
        squares,
        channels,
        height,
        width,
        filters,
        out_width,
        positions,
        window,
        *stride,
        *padding,
        *dilation,
        tiles_across,
        num_tiles,
        KERNEL_W=kernel[1],
        KERNEL=kernel[0] * kernel[1],
        STORE=store,
        PRECISION="tf32" if coarse else "ieee",
        BLOCK_P=block_p,
        BLOCK_W=block_w,
        BLOCK_T=block_t,
        num_warps=8 if block_p == 128 else 4,
        num_stages=3 if positions >= 256 else 2,
    )
    return rows, squares.sum(dim=1)
