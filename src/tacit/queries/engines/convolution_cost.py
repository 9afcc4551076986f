"""Which way to the norms of a convolution's gradients costs least, by the layer's shape.

In units of one FLOP of the matrix product that makes rows, for one group of one record with T
positions, windows of W = C·K numbers over P pixels, and M channels on the other side:

  pixels   2·gram·(P²·C + T²·M) + addition·(A + T²)    A additions of `convolution_gram`
  windows  2·gram·T²·(W + M) + addition·T² + copy·T·W
  rows     2·T·W·M + copy·(T·W + W·M)

Where a kernel reads windows in place, rows cost 2·T·W·M, and windows are never unfolded. A record
whose Gram matrix would not fit a modest workspace goes by rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from tacit.queries.engines.convolution_gram import Axis, num_additions


class Way(Enum):
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
    """`channels` and `others` of one group; `fused`: a kernel reads windows in place."""
    prices = _CPU if device.type == "cpu" else _GPU
    positions = math.prod(axis.count for axis in axes)
    pixels = math.prod(axis.span for axis in axes)
    window = channels * math.prod(axis.kernel for axis in axes)
    pairs, unfolded = positions**2, positions * window
    costs = {Way.ROWS: 2.0 * unfolded * others}
    if not fused:
        costs[Way.ROWS] += prices.copy * (unfolded + window * others)
    if groups * pixels**2 <= _LARGEST:
        products = 2 * prices.gram * (pixels**2 * channels + pairs * others)
        costs[Way.PIXELS] = products + prices.addition * (num_additions(axes) + pairs)
    if groups * pairs <= _LARGEST and not fused:
        products = 2 * prices.gram * pairs * (window + others)
        costs[Way.WINDOWS] = products + prices.addition * pairs + prices.copy * unfolded
    return min(costs, key=lambda way: costs[way])
