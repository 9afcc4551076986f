"""One convolution's per-record weight gradients on a GPU, without unfolding windows.

For record i, output channel p and window entry w = (c, k): G_i[p, w] = Σ_t b_i[p, t]·a_i[c, t∘k], a
matrix product whose second factor is read from the input by index, so that nothing nine times the
size of the input is ever written. The same pass sums the squares of what it computed, so the norm
is of the very numbers that are stored. Float32, with TensorFloat-32 where convolutions use it.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

from torch import Tensor

from tacit.tensor_float import uses_tensor_float

AVAILABLE = importlib.util.find_spec("triton") is not None

if AVAILABLE:
    import triton

    from tacit.queries.engines.convolution_kernels import over_places, over_positions

_SMALL_MAP = 64  # positions that one tile holds


class Tiles(NamedTuple):
    """How much a program works on at once.

    `over_places`: all positions of the map, and the window's places one after another; else some
    entries of the window, and the map's positions one after another.
    """

    filters: int
    window: int
    positions: int
    num_warps: int
    num_stages: int
    over_places: bool = False


def tiles_for(filters: int, channels: int, positions: int) -> Tiles:
    """What did best on an H200, over the layers of three networks."""
    block_p = min(128, max(32, triton.next_power_of_2(filters)))
    if channels < 16:
        return Tiles(block_p, 32, 64 if block_p == 32 else 32, 4, 3)
    if positions <= _SMALL_MAP:
        block_w = min(64, triton.next_power_of_2(channels))
        block_t = max(16, triton.next_power_of_2(positions))
        return Tiles(block_p, block_w, block_t, 8 if block_p == 128 else 4, 2, over_places=True)
    return Tiles(block_p, 128 if block_p == 64 else 64, 32, 4, 3)


def weight_gradients(
    layer: Any, inputs: Tensor, cotangent: Tensor, *, store: bool, tiles: Tiles | None = None
) -> tuple[Tensor | None, Tensor]:
    """(rows or None, squared norms) of each record; a 1-D convolution is a 2-D one of height 1.

    `inputs` are zero-padded by the layer's own padding inside the kernel. Rows have the shape of
    the weight, and lie in memory with its channels last.
    """
    one_row = len(layer.kernel_size) == 1
    if one_row:
        inputs, cotangent = inputs.unsqueeze(2), cotangent.unsqueeze(2)

    def pair(values: Any, first: int) -> tuple[int, int]:
        return (first, int(values[0])) if one_row else (int(values[0]), int(values[1]))

    kernel, stride = pair(layer.kernel_size, 1), pair(layer.stride, 1)
    padding, dilation = pair(layer.padding, 0), pair(layer.dilation, 1)
    inputs, cotangent = inputs.contiguous(), cotangent.contiguous()
    batch, channels, height, width = inputs.shape
    filters, out_height, out_width = cotangent.shape[1:]
    positions, size = out_height * out_width, kernel[0] * kernel[1]
    tiles = tiles or tiles_for(filters, channels, positions)
    assert positions <= tiles.positions or not tiles.over_places
    entries = channels if tiles.over_places else size * channels
    tiles_across = triton.cdiv(entries, tiles.window)
    num_tiles = tiles_across * triton.cdiv(filters, tiles.filters)
    squares = inputs.new_empty(batch, num_tiles)
    rows = inputs.new_empty(batch, filters, *layer.kernel_size, channels) if store else None
    given = [inputs, cotangent, squares if rows is None else rows, squares, channels]
    given += [height, width, filters, out_width, positions, *stride, *padding, *dilation]
    settings = {
        "KERNEL_W": kernel[1],
        "KERNEL": size,
        "STORE": store,
        "PRECISION": "tf32" if uses_tensor_float("convolution", inputs.device) else "ieee",
        "BLOCK_P": tiles.filters,
        "BLOCK_W": tiles.window,
        "BLOCK_T": tiles.positions,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    programs = over_places if tiles.over_places else over_positions
    programs[(batch * num_tiles,)](*given, tiles_across, num_tiles, **settings)
    shaped = None if rows is None else rows.movedim(-1, 2)
    return shaped, squares.sum(dim=1)
