"""One convolution's per-record weight gradients on a GPU, without unfolding windows.

For record i, output channel p and window entry w = (k, c): G_i[p, w] = Σ_t b_i[p, t]·a_i[c, t∘k], a
matrix product whose second factor is read from the input by index, so that nothing nine times the
size of the input is ever written. The same pass sums the squares of what it computed, so the norm
is of the very numbers that are stored. Float32, with TensorFloat-32 where convolutions use it.

A program makes a tile of some p by some w, for one record, and sums its squares. Tiles of one
record are neighbours in the order of launch: they read its input while it is still in the cache.

A kernel that is launched directly is invisible to a tracer: what it wrote during the trace would
become a constant of the recording, and every replay would add the first batch's gradients. So the
kernels here and in `ghost_kernels` are PyTorch operators in the namespace `tacit::`, with fake
implementations, and are recorded as calls. They mutate nothing, and no output shares memory with
an input. `fits` looks at device, type and shape, and never at values.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None

if AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def _tile(  # type: ignore[no-untyped-def]
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
        OVER_PLACES: tl.constexpr,
        BLOCK_P: tl.constexpr,
        BLOCK_W: tl.constexpr,
        BLOCK_T: tl.constexpr,
    ):
        """One tile: some window entries over all positions, or some channels, place by place.

        The second way is for maps so small that b fits into a program at once: b is read once, and
        the input is read again from the cache for each place of the window.
        """
        record = (tl.program_id(0) // num_tiles).to(tl.int64)
        tile = tl.program_id(0) % num_tiles
        p = (tile // tiles_across) * BLOCK_P + tl.arange(0, BLOCK_P)
        w = (tile % tiles_across) * BLOCK_W + tl.arange(0, BLOCK_W)
        image = inputs + record * channels * height * width
        b_at = cotangent + record * filters * positions + p[:, None] * positions
        if OVER_PLACES:
            t = tl.arange(0, BLOCK_T)
            b = tl.load(
                b_at + t[None, :],
                mask=(p[:, None] < filters) & (t[None, :] < positions),
                other=0.0,
            )
            top = (t // out_width) * stride_h - pad_h
            left = (t % out_width) * stride_w - pad_w
            a_at = image + w[:, None] * (height * width)
            to = rows + (record * filters + p[:, None]) * channels * KERNEL + w[None, :]
            exists = (p[:, None] < filters) & (w[None, :] < channels)
            total = tl.zeros((BLOCK_P,), dtype=tl.float32)
            for k in range(KERNEL):
                y = top + (k // KERNEL_W) * dilation_h
                x = left + (k % KERNEL_W) * dilation_w
                inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & (t < positions)
                a = tl.load(
                    a_at + (y * width + x)[None, :],
                    mask=inside[None, :] & (w < channels)[:, None],
                    other=0.0,
                )
                found = tl.dot(b, tl.trans(a), input_precision=PRECISION)
                if STORE:
                    tl.store(to + k * channels, found, mask=exists)
                total += tl.sum(found * found, axis=1)
            tl.store(squares + record * num_tiles + tile, tl.sum(total))
        else:
            window = channels * KERNEL
            exists = w < window
            channel = w % channels
            k_h = (w // channels) // KERNEL_W * dilation_h - pad_h
            k_w = (w // channels) % KERNEL_W * dilation_w - pad_w
            found = tl.zeros((BLOCK_P, BLOCK_W), dtype=tl.float32)
            for start in range(0, positions, BLOCK_T):
                t = start + tl.arange(0, BLOCK_T)
                b = tl.load(
                    b_at + t[None, :],
                    mask=(p[:, None] < filters) & (t[None, :] < positions),
                    other=0.0,
                )
                # Along t the input lies in one line, so neighbouring threads read along t.
                y = (t // out_width)[None, :] * stride_h + k_h[:, None]
                x = (t % out_width)[None, :] * stride_w + k_w[:, None]
                inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & (t[None, :] < positions)
                a = tl.load(
                    image + channel[:, None] * (height * width) + (y * width + x),
                    mask=inside & exists[:, None],
                    other=0.0,
                )
                found = tl.dot(b, tl.trans(a), found, input_precision=PRECISION)
            if STORE:
                at = rows + record * filters * window + p[:, None] * window + w[None, :]
                tl.store(at, found, mask=(p[:, None] < filters) & exists[None, :])
            tl.store(squares + record * num_tiles + tile, tl.sum(found * found))


_SMALL_MAP = 64  # positions that one tile holds


class Tiles(NamedTuple):
    """How much a program works on at once.

    With `over_places`, a program holds all positions of the map and goes through the window's
    places. Otherwise it holds some entries of the window and goes through the map's positions.
    """

    filters: int
    window: int
    positions: int
    num_warps: int
    num_stages: int
    over_places: bool = False


def tiles_for(filters: int, channels: int, positions: int) -> Tiles:
    """The tiles that were fastest on an H200, over the layers of three networks."""
    block_p = min(128, max(32, _power_of_2(filters)))
    if channels < 16:
        return Tiles(block_p, 32, 64 if block_p == 32 else 32, 4, 3)
    if positions <= _SMALL_MAP:
        block_w = min(64, _power_of_2(channels))
        block_t = max(16, _power_of_2(positions))
        return Tiles(block_p, block_w, block_t, 8 if block_p == 128 else 4, 2, over_places=True)
    return Tiles(block_p, 128 if block_p == 64 else 64, 32, 4, 3)


def fits(inputs: Tensor, groups: int) -> bool:
    """Float32 on a GPU, in one or two dimensions, without groups."""
    single = inputs.is_cuda and inputs.dtype == torch.float32
    return AVAILABLE and single and groups == 1 and inputs.dim() in (3, 4)


def squares_depth(
    inputs: Tensor, cotangent: Tensor, kernel_size: Sequence[int], tiles: Tiles | None = None
) -> int:
    """How often a square is rounded on its way into the sum, at most.

    A tile has up to 128 × 128 entries in 128 threads or more: a chain of 128 and a tree of 7, once
    for each place of a small map's window; then the tiles of a record are added.
    """
    filters, channels = cotangent.shape[1], inputs.shape[1]
    tiles = tiles or tiles_for(filters, channels, math.prod(cotangent.shape[2:]))
    _, num_tiles = _grid(tiles, filters, channels, math.prod(kernel_size))
    return 1 + 128 + 16 + math.prod(kernel_size) + num_tiles


_ARGUMENTS = (
    "(Tensor inputs, Tensor cotangent, int[] kernel_size, int[] stride, int[] padding, "
    "int[] dilation, bool tensor_float)"
)


@torch.library.custom_op(
    "tacit::convolution_rows",
    mutates_args=(),
    device_types="cuda",
    schema=_ARGUMENTS + " -> (Tensor, Tensor)",
)
def convolution_rows(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(rows, squared norms) of each record; rows are (B, filters, *kernel_size, channels)."""
    rows, squares = launch(*arguments, store=True)
    assert rows is not None
    return rows, squares


@convolution_rows.register_fake
def _(
    inputs: Tensor, cotangent: Tensor, kernel_size: Sequence[int], *_: Any
) -> tuple[Tensor, Tensor]:
    shape = (inputs.shape[0], cotangent.shape[1], *kernel_size, inputs.shape[1])
    return inputs.new_empty(shape), inputs.new_empty(inputs.shape[0])


@torch.library.custom_op(
    "tacit::convolution_squares",
    mutates_args=(),
    device_types="cuda",
    schema=_ARGUMENTS + " -> Tensor",
)
def convolution_squares(*arguments: Any) -> Tensor:
    """The squared norms alone; the rows are never written."""
    return launch(*arguments, store=False)[1]


@convolution_squares.register_fake
def _(inputs: Tensor, *_: Any) -> Tensor:
    return inputs.new_empty(inputs.shape[0])


def launch(
    inputs: Tensor,
    cotangent: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    tensor_float: bool,
    *,
    store: bool,
    tiles: Tiles | None = None,
) -> tuple[Tensor | None, Tensor]:
    """(rows or None, squared norms); a 1-D convolution is a 2-D one of height 1.

    `inputs` are zero-padded inside the kernel.
    """
    one_row = len(kernel_size) == 1
    if one_row:
        inputs, cotangent = inputs.unsqueeze(2), cotangent.unsqueeze(2)

    def pair(values: Sequence[int], first: int) -> tuple[int, int]:
        return (first, int(values[0])) if one_row else (int(values[0]), int(values[1]))

    kernel = pair(kernel_size, 1)
    inputs, cotangent = inputs.contiguous(), cotangent.contiguous()
    batch, channels, height, width = inputs.shape
    filters, out_height, out_width = cotangent.shape[1:]
    positions, size = out_height * out_width, kernel[0] * kernel[1]
    tiles = tiles or tiles_for(filters, channels, positions)
    assert positions <= tiles.positions or not tiles.over_places
    tiles_across, num_tiles = _grid(tiles, filters, channels, size)
    squares = inputs.new_empty(batch, num_tiles)
    rows = inputs.new_empty(batch, filters, *kernel_size, channels) if store else None
    if batch == 0:
        return rows, squares.sum(dim=1)
    given = [inputs, cotangent, squares if rows is None else rows, squares, channels]
    given += [height, width, filters, out_width, positions]
    given += [*pair(stride, 1), *pair(padding, 0), *pair(dilation, 1)]
    settings = {
        "KERNEL_W": kernel[1],
        "KERNEL": size,
        "STORE": store,
        "PRECISION": "tf32" if tensor_float else "ieee",
        "OVER_PLACES": tiles.over_places,
        "BLOCK_P": tiles.filters,
        "BLOCK_W": tiles.window,
        "BLOCK_T": tiles.positions,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    _tile[(batch * num_tiles,)](*given, tiles_across, num_tiles, **settings)
    return rows, squares.sum(dim=1)


def _grid(tiles: Tiles, filters: int, channels: int, size: int) -> tuple[int, int]:
    """Tiles along the window, and tiles in all, of one record."""
    entries = channels if tiles.over_places else size * channels
    across = math.ceil(entries / tiles.window)
    return across, across * math.ceil(filters / tiles.filters)


def _power_of_2(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
