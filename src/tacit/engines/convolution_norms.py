"""Norms of a convolution's gradients: inner products of windows, and which way costs least.

Windows overlap, so most products of two windows are products of the same pixels. With x_p the C
channels of pixel p, δ the K places in a window and s the stride,

  a_t·a_u = Σ_δ x_{s·t+δ}·x_{s·u+δ},

so the pixels' Gram matrix, of width C instead of C·K, is made once and added up along shifted
diagonals. The offset of an axis moves only that axis, so one axis is added up at a time: 3 + 3
additions for a 3×3 window instead of 9.

Rounding, in the terms of `norms`: x_p·x_q is off by n_C·u·‖x_p‖‖x_q‖, with n_C roundings of a
product of width C, and loses up to C·τ. Adding K of them, k along each axis, rounds each Σ k times
more in any order, so a_t·a_u is off by at most

  (n_C + Σ k)·u·Σ_δ ‖x_{s·t+δ}‖‖x_{s·u+δ}‖ ≤ (n_C + Σ k)·u·‖a_t‖‖a_u‖   (Cauchy and Schwarz)

and loses up to K·C·τ: sums that are too small for a normal number are exact. So the result is a
Gram matrix of width K·C and depth n_C + Σ k.

**Costs** of the three ways to a norm, in units of one FLOP of the matrix product that makes rows,
for one group of one record with T positions, windows of W = C·K numbers over P pixels, and M
channels on the other side:

  pixels   2·gram·(P²·C + T²·M) + addition·(A + T²)    A additions of `window_gram`
  windows  2·gram·T²·(W + M) + addition·T² + copy·T·W
  rows     2·T·W·M + copy·(T·W + W·M)

Where a GPU kernel reads windows in place, rows cost 2·T·W·M and windows 2·T'·(W + M), where T' is
half of T² in whole tiles: nothing is unfolded or written. Elsewhere a record whose Gram matrix
would not fit a modest workspace goes by rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.engines.kernels import for_compiler, ghost
from tacit.engines.norms import Gram, dot_depth, inner_products


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution: how many windows there are, and where they lie."""

    count: int
    kernel: int
    stride: int
    dilation: int

    @property
    def span(self) -> int:
        """How many pixels the windows reach."""
        return (self.count - 1) * self.stride + (self.kernel - 1) * self.dilation + 1

    @property
    def overlap(self) -> int:
        """How many windows a pixel lies in, at most: one for each place that is s·t away."""
        places = self.kernel if self.dilation > 1 else math.ceil(self.kernel / self.stride)
        return min(places, self.count)


class Way(Enum):
    """How the norm is taken: from products of pixels or windows, or of rows made and dropped."""

    PIXELS = auto()
    WINDOWS = auto()
    ROWS = auto()


@dataclass(frozen=True)
class Prices:
    """Of one FLOP of a Gram matrix, one addition of its entries, one number moved."""

    gram: float
    addition: float
    copy: float


# A server's CPU with two threads, 250 GFLOP/s.
_CPU = Prices(gram=1, addition=80, copy=450)
# An H200: rows in TensorFloat-32 at 71 TFLOP/s, Gram matrices in float32; the rest is memory.
_GPU = Prices(gram=2, addition=213, copy=142)
# The same where a compiler fuses all additions into one pass over each Gram matrix.
_COMPILED = Prices(gram=3, addition=0, copy=120)

_IN_TILES = 8  # price of one FLOP of a Gram matrix in the GPU kernel that makes it in tiles

_LARGEST = 1 << 26  # numbers in all Gram matrices of one record


def cheapest(
    axes: Sequence[Axis],
    channels: int,
    others: int,
    groups: int,
    *,
    device: torch.device,
    fused: bool,
) -> Way:
    """`channels` and `others` of one group; `fused`: kernels read windows in place."""
    prices = _CPU if device.type == "cpu" else _GPU
    positions = math.prod(axis.count for axis in axes)
    pixels = math.prod(axis.span for axis in axes)
    window = channels * math.prod(axis.kernel for axis in axes)
    pairs, unfolded = positions**2, positions * window
    if fused:
        in_tiles = 2 * _IN_TILES * ghost.entries(positions) * (window + others)
        rows = 2 * unfolded * others
        if for_compiler():
            own = math.prod(axis.count * axis.stride for axis in axes)  # without the padding
            products = 2 * _COMPILED.gram * (own**2 * channels + pairs * others)
            if products + _COMPILED.copy * (own**2 + pairs) < rows:
                return Way.PIXELS
        return Way.ROWS if rows <= in_tiles else Way.WINDOWS
    costs = {Way.ROWS: 2.0 * unfolded * others + prices.copy * (unfolded + window * others)}
    if groups * pixels**2 <= _LARGEST:
        products = 2 * prices.gram * (pixels**2 * channels + pairs * others)
        costs[Way.PIXELS] = products + prices.addition * (num_additions(axes) + pairs)
    if groups * pairs <= _LARGEST:
        products = 2 * prices.gram * pairs * (window + others)
        costs[Way.WINDOWS] = products + prices.addition * pairs + prices.copy * unfolded
    return min(costs, key=lambda way: costs[way])


def window_gram(pixels: Tensor, groups: int, axes: Sequence[Axis], padding: Sequence[int]) -> Gram:
    """(B, G, T, T) from the pixels, (B, G·C, …). Products with padding are zeros, and not made."""
    width, sizes = pixels.shape[1] // groups, pixels.shape[2:]
    x_BGPC = pixels.reshape(len(pixels), groups, width, math.prod(sizes)).transpose(2, 3)
    inner = inner_products(x_BGPC, x_BGPC).reshape(len(pixels), groups, *sizes, *sizes)
    # Behind its windows an axis may have pixels that no window reaches: they are cut off.
    sides = [
        (pad, axis.span - pad - size) for axis, pad, size in zip(axes, padding, sizes, strict=True)
    ]
    inner = F.pad(inner, [side for pair in reversed(sides * 2) for side in pair])
    for i in reversed(range(len(axes))):
        inner = _added_up(inner, axes[i], (2 + i, 2 + len(axes) + i))
    positions = math.prod(axis.count for axis in axes)
    size = math.prod(axis.kernel for axis in axes)
    return Gram(
        inner.reshape(len(pixels), groups, positions, positions),
        size * width,
        dot_depth(width) + sum(axis.kernel for axis in axes),
    )


def num_additions(axes: Sequence[Axis]) -> int:
    """How many additions `window_gram` makes, for each group and record."""
    total, entries = 0, math.prod(axis.span for axis in axes) ** 2
    for axis in reversed(axes):
        entries = entries // axis.span**2 * axis.count**2
        total += (axis.kernel - 1) * entries
    return total


def _added_up(inner: Tensor, axis: Axis, dims: tuple[int, int]) -> Tensor:
    """Σ_δ of the entries (s·t + δ, s·u + δ) along one axis of both pixels."""

    def shifted(k: int) -> Tensor:
        start = k * axis.dilation
        stop = start + (axis.count - 1) * axis.stride + 1
        at = [slice(None)] * inner.dim()
        for dim in dims:
            at[dim] = slice(start, stop, axis.stride)
        return inner[tuple(at)]

    total = shifted(0)
    for k in range(1, axis.kernel):
        total = total + shifted(k)
    return total
