"""The GPU kernels of `convolution_triton`: G_i[p, w] = Σ_t b_i[p, t]·a_i[c, t∘k], w = (k, c).

A program makes a tile of some p by some w, for one record, and sums its squares. Tiles of one
record are neighbours in the order of launch: they read its input while it is still in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def over_positions(  # type: ignore[no-untyped-def]
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
    """One tile, position after position."""
    record = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    p = (tile // tiles_across) * BLOCK_P + tl.arange(0, BLOCK_P)
    across = tile % tiles_across
    window = channels * KERNEL
    w = across * BLOCK_W + tl.arange(0, BLOCK_W)
    exists = w < window
    channel = w % channels
    k_h = (w // channels) // KERNEL_W * dilation_h - pad_h
    k_w = (w // channels) % KERNEL_W * dilation_w - pad_w
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
        y = (t // out_width)[None, :] * stride_h + k_h[:, None]
        x = (t % out_width)[None, :] * stride_w + k_w[:, None]
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & (t[None, :] < positions)
        a = tl.load(
            a_at + channel[:, None] * (height * width) + (y * width + x),
            mask=inside & exists[:, None],
            other=0.0,
        )
        total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
    if STORE:
        at = rows + record * filters * window + p[:, None] * window + w[None, :]
        tl.store(at, total, mask=(p[:, None] < filters) & exists[None, :])
    tl.store(squares + record * num_tiles + tile, tl.sum(total * total))


@triton.jit
def over_places(  # type: ignore[no-untyped-def]
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
    """The tiles of some p and some channels, place after place of the window.

    For maps so small that b fits at once: it is read once, and the input again from the cache.
    """
    record = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    p = (tile // tiles_across) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = (tile % tiles_across) * BLOCK_W + tl.arange(0, BLOCK_W)
    t = tl.arange(0, BLOCK_T)
    b = tl.load(
        cotangent + record * filters * positions + p[:, None] * positions + t[None, :],
        mask=(p[:, None] < filters) & (t[None, :] < positions),
        other=0.0,
    )
    top = (t // out_width) * stride_h - pad_h
    left = (t % out_width) * stride_w - pad_w
    a_at = inputs + record * channels * height * width + channel[:, None] * (height * width)
    to = rows + (record * filters + p[:, None]) * channels * KERNEL + channel[None, :]
    exists = (p[:, None] < filters) & (channel[None, :] < channels)
    total = tl.zeros((BLOCK_P,), dtype=tl.float32)
    for k in range(KERNEL):
        y = top + (k // KERNEL_W) * dilation_h
        x = left + (k % KERNEL_W) * dilation_w
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & (t < positions)
        a = tl.load(
            a_at + (y * width + x)[None, :],
            mask=inside[None, :] & (channel < channels)[:, None],
            other=0.0,
        )
        found = tl.dot(b, tl.trans(a), input_precision=PRECISION)
        if STORE:
            tl.store(to + k * channels, found, mask=exists)
        total += tl.sum(found * found, axis=1)
    tl.store(squares + record * num_tiles + tile, tl.sum(total))
