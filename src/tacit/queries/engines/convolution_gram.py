"""Inner products of a convolution's windows, from inner products of pixels.

Windows overlap, so most products of two windows are products of the same pixels. With x_p the C
channels of pixel p, δ the K places in a window and s the stride,

  a_t·a_u = Σ_δ x_{s·t+δ}·x_{s·u+δ},

so the pixels' Gram matrix, of width C instead of C·K, is made once and added up along shifted
diagonals. The offset of an axis moves only that axis, so one axis is added up at a time: 3 + 3
additions for a 3×3 window instead of 9.

Rounding, in the terms of `ghost`: x_p·x_q is off by n_C·u·‖x_p‖‖x_q‖, with n_C roundings of a
product of width C, and loses up to C·τ. Adding K of them, k along each axis, rounds each Σ k times
more, so a_t·a_u is off by at most

  (n_C + Σ k)·u·Σ_δ ‖x_{s·t+δ}‖‖x_{s·u+δ}‖ ≤ (n_C + Σ k)·u·‖a_t‖‖a_u‖   (Cauchy and Schwarz)

and loses up to K·C·τ: sums that are too small for a normal number are exact. That is what a Gram
matrix of width K·C and depth n_C + Σ k may do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tacit.queries.engines.ghost import Gram, dot_depth, gram


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


def window_gram(pixels: Tensor, groups: int, axes: Sequence[Axis]) -> Gram:
    """(B, G, T, T) from the pixels as windows see them, (B, G·C, …), padding included."""
    for i, axis in enumerate(axes):
        pixels = pixels.narrow(2 + i, 0, axis.span)
    x_BGPC = pixels.flatten(2).unflatten(1, (groups, -1)).transpose(2, 3)
    spans = [axis.span for axis in axes]
    inner = gram(x_BGPC).reshape(len(pixels), groups, *spans, *spans)
    for i in reversed(range(len(axes))):
        inner = _added_up(inner, axes[i], (2 + i, 2 + len(axes) + i))
    positions = math.prod(axis.count for axis in axes)
    size = math.prod(axis.kernel for axis in axes)
    width = x_BGPC.shape[-1]
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

    if axis.kernel == 1:
        return shifted(0)
    total = shifted(0) + shifted(1)
    for k in range(2, axis.kernel):
        total += shifted(k)
    return total
