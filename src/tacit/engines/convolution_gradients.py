"""Per-record gradients of convolution kernels, in one, two or three dimensions.

A convolution is a product with windows: with a_t the window (C·K numbers) that output position t
reads and b_t the cotangent there, ∂/∂W = Σ_t b_t a_tᵀ, group by group. A transposed convolution is
the same with its two sides exchanged: windows of the cotangent, and inputs at the positions.

Small rows are kept. For large ones only norms are: from a GPU kernel that drops the rows it makes,
or else ghost norms (`products`), where T² inner products cost less than a row.

**Ghost norms.** Windows overlap, so most products of two windows are products of the same pixels.
With x_p the C channels of pixel p, δ the K places in a window and s the stride,

  a_t·a_u = Σ_δ x_{s·t+δ}·x_{s·u+δ},

so the pixels' Gram matrix, of width C instead of C·K, is computed once and added up along shifted
diagonals, one axis at a time: 3 + 3 additions for a 3×3 window instead of 9.

Rounding, in the terms of `products`: x_p·x_q is off by n_C·u·‖x_p‖‖x_q‖, with n_C roundings of a
product of width C, and loses up to C·τ. Adding K of them, k along each axis, rounds each Σ k times
more in any order, so a_t·a_u is off by at most

  (n_C + Σ k)·u·Σ_δ ‖x_{s·t+δ}‖‖x_{s·u+δ}‖ ≤ (n_C + Σ k)·u·‖a_t‖‖a_u‖   (Cauchy and Schwarz)

and loses up to K·C·τ: sums that are too small for a normal number are exact. So the result is a
Gram matrix of width K·C and depth n_C + Σ k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.engines import convolution_kernels as fused_kernel
from tacit.engines.clipping import (
    Moved,
    RecordGradients,
    RowScale,
    Stacked,
    added,
    for_compiler,
    sum_of_squares,
)
from tacit.engines.products import (
    Contracted,
    Gram,
    dot_depth,
    ghost_norms,
    in_pieces,
    inner_products,
    norms_from_grams,
    piece,
    rows_are_kept,
    safe_squares,
)
from tacit.precision import uses_tf32, wide_together


def kernel_gradients(
    inputs: Tensor,
    cotangent: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    rows_per_record: int = 1,
) -> RecordGradients:
    """The kernel's gradient of each record, from the arguments of `aten.convolution`.

    Args:
        inputs: (B·R, C_in, …), with the R rows of a record one after another.
        cotangent: (B·R, C_out, …), the gradient at the convolution's output.
        weight: the kernel; only its shape is used.
        rows_per_record: R. A record's gradient is the sum over its rows.
    """
    shape = tuple(weight.shape)
    dims = len(shape) - 2
    stride, padding, dilation = (_each(v, dims) for v in (stride, padding, dilation))
    inputs, cotangent = wide_together(inputs, cotangent)
    windowed, plain = (cotangent, inputs) if transposed else (inputs, cotangent)
    if transposed:
        extra = _each(output_padding, dims)
        if any(e >= s for e, s in zip(extra, stride, strict=True)):
            # Output positions that no input reaches would make room for one more window.
            sides = zip(padding, extra, strict=True)
            windowed = _pad(windowed, [(p, p - e) for p, e in sides])
            padding = (0,) * dims
    if rows_per_record > 1:
        windowed = _pad(windowed, [(p, p) for p in padding])
        reach = (shape[2] - 1) * dilation[0] + 1
        windowed, plain = _end_to_end(windowed, plain, reach, stride[0], rows_per_record)
        padding = (0,) * dims
    return Kernel(windowed, plain, shape, stride, padding, dilation, groups).gradients()


@dataclass
class Kernel:
    """The gradients of one kernel: windows of one side, positions of the other.

    B records, G groups, T positions, W = channels × kernel size of a window, M = channels of the
    side that has no windows, both in one group.
    """

    windowed: Tensor
    plain: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __post_init__(self) -> None:
        self.kernel_size = self.shape[2:]
        self.positions = math.prod(self.plain.shape[2:])
        self.channels = self.windowed.shape[1] // self.groups
        self.window = self.channels * math.prod(self.kernel_size)
        self.others = self.plain.shape[1] // self.groups
        self.counts = self.plain.shape[2:]  # of windows along each axis
        axes = list(zip(self.counts, self.kernel_size, self.stride, self.dilation, strict=True))
        self.spans = [(n - 1) * s + (k - 1) * d + 1 for n, k, s, d in axes]
        self.pixels = math.prod(self.spans)
        # The most windows that a pixel lies in: one for each place that is s·t away.
        self.overlap = math.prod(min(n, k if d > 1 else -(-k // s)) for n, k, s, d in axes)
        # P²·C or T²·C·K products: windows far apart reach many pixels.
        self.by_pixels = self.pixels**2 <= self.positions**2 * math.prod(self.kernel_size)

    def gradients(self) -> RecordGradients:
        """Rows if they are small, else norms and a contraction."""
        fused = fused_kernel.fits(self.windowed, self.groups)
        if self.groups > 1 and self.channels == 1 and self.plain.is_cuda and len(self.counts) <= 2:
            return Stacked(self._rows_by_channel())
        # The GPU kernel gains nothing from larger rows; elsewhere they save a contraction.
        times, row = 1 if fused else 2, math.prod(self.shape)
        if rows_are_kept(row, self.windowed, self.plain, times=times):
            return self._fused_rows() if fused else Stacked(self.rows())
        by_rows = fused and self.positions > 1 and not (for_compiler() and self._pixels_are_few())
        return self.by_fused_norms() if by_rows else self.by_ghost_norms()

    def _pixels_are_few(self) -> bool:
        """Whether products of pixels cost less than rows, in a step compiled for a GPU.

        The unit is one FLOP of the kernel that makes rows. On an H200 a FLOP of a float32 product
        costs 3, and writing and reading one number of a Gram matrix 120.
        """
        own, pairs = math.prod(self.windowed.shape[2:]) ** 2, self.positions**2
        products = 2 * 3 * (own * self.channels + pairs * self.others) + 120 * (own + pairs)
        return self.by_pixels and products < 2 * self.positions * self.window * self.others

    def by_fused_norms(self) -> Contracted:
        squares = fused_kernel.convolution_squares(*self._fused_arguments())
        reach = self.reach()
        norms = safe_squares(self._fused_squares(squares), reach, 0, 2 * self.positions)
        return self._contracted(norms, reach, int(uses_tf32("convolution", self.plain)))

    def by_ghost_norms(self) -> Contracted:
        """Σ over groups of Σ_{t,u} (a_t·a_u)(b_t·b_u), from above; see `products`."""

        def norms_of(part: slice) -> tuple[Tensor, Tensor]:
            if self.by_pixels:
                return norms_from_grams(self.window_gram(part), Gram.of(self.at_positions(part)))
            return ghost_norms(self.windows(part), self.at_positions(part))

        numbers = 2 * self.pixels**2 if self.by_pixels else self.positions * self.window
        norms, reach = self._in_pieces(numbers + 3 * self.positions**2, norms_of)
        return self._contracted(norms, reach)

    def _contracted(self, norms: Tensor, reach: Tensor, coarse: int = 0) -> Contracted:
        """`coarse` counts the products behind the norm that ran in TensorFloat-32."""
        if self.plain.device.type != "cpu":
            reach = torch.maximum(reach, self.whole_reach())
        coarse += int(uses_tf32("convolution", self.plain))
        return Contracted(norms, reach, self._contract, self.rows, coarse)

    def rows(self) -> Tensor:
        def rows_of(part: slice) -> tuple[Tensor]:
            return (self.at_positions(part).transpose(2, 3) @ self.windows(part),)

        (rows,) = self._in_pieces(self.positions * self.window, rows_of)
        return rows.reshape(len(self.plain), *self.shape)

    def _rows_by_channel(self) -> Tensor:
        """Rows of a kernel that reads one channel per group, as one convolution.

        ∂W[c, k] = Σ_t a[c, s·t + d·k − p]·b[c, t] is itself a convolution of a by b, with stride
        and dilation exchanged and one group per channel of each record.
        """
        windowed, plain = self.windowed.flatten(0, 1)[None], self.plain.flatten(0, 1)[:, None]
        convolve = F.conv2d if len(self.counts) == 2 else F.conv1d
        groups = len(self.plain) * self.groups
        rows = convolve(windowed, plain, None, self.dilation, self.padding, self.stride, groups)
        for i, size in enumerate(self.kernel_size):
            rows = rows.narrow(2 + i, 0, size)
        return rows.reshape(len(self.plain), *self.shape)

    def _fused_rows(self) -> RecordGradients:
        rows, squares = fused_kernel.convolution_rows(*self._fused_arguments())
        lying = Stacked(rows, self._fused_squares(squares))  # channels last
        return Moved([(lying, lambda row: row.movedim(-1, 1))])

    def _fused_arguments(self) -> tuple[Any, ...]:
        geometry = self.kernel_size, self.stride, self.padding, self.dilation
        return self.windowed, self.plain, *geometry, uses_tf32("convolution", self.plain)

    def _fused_squares(self, squares: Tensor) -> Tensor:
        """From above: adds what the kernel's sums may have rounded off, and vanished squares."""
        finfo = torch.finfo(squares.dtype)
        depth = fused_kernel.squares_depth(self.windowed, self.plain, self.kernel_size)
        return squares * (1 + (depth + 2) * finfo.eps / 2) + math.prod(self.shape) * finfo.tiny

    def reach(self) -> Tensor:
        """√n·‖a‖·‖b‖ ≥ S, where no pixel lies in more than n windows.

        S = Σ_t ‖a_t‖‖b_t‖ ≤ (Σ_t ‖a_t‖²)^½·‖b‖, and Σ_t ‖a_t‖² counts each pixel at most n times.
        """
        return self.whole_reach() * math.sqrt(self.overlap)

    def whole_reach(self) -> Tensor:
        """‖a‖·‖b‖: a GPU may contract by Fourier transforms, which round at *all* positions.

        Where a is far from b, S is zero but the roundings of a transform are not.
        """
        a, b = (sum_of_squares(side).sqrt() for side in (self.windowed, self.plain))
        return a * b

    def _contract(self, scale: RowScale) -> Tensor:
        """The weight gradient of the scaled batch, by the convolution's own backward pass."""
        plain = scale.of(self.plain)
        return torch.ops.aten.convolution_backward(
            plain,
            scale.present(self.windowed),
            plain.new_empty(self.shape),  # the kernel: only its shape matters here
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0,) * len(self.kernel_size),
            self.groups,
            [False, True, False],
        )[1]

    def windows(self, part: slice) -> Tensor:
        """The windows of some records, as (B, G, T, W)."""
        x, dims = self._padded(part), len(self.counts)
        axes = zip(self.counts, self.kernel_size, self.stride, self.dilation, strict=True)
        for i, (count, kernel, stride, dilation) in enumerate(axes):
            x = x.unfold(2 + i, (kernel - 1) * dilation + 1, stride)
            x = x[..., ::dilation].narrow(2 + i, 0, count)
        # B, C, T…, K… → B, G, T…, C/G, K…
        x = x.unflatten(1, (self.groups, self.channels))
        order = [0, 1, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims)]
        return x.permute(order).reshape(len(x), self.groups, self.positions, self.window)

    def window_gram(self, part: slice) -> Gram:
        """a_t·a_u of the windows of some records, (B, G, T, T), from products of pixels."""
        pixels, dims = piece(self.windowed, part), len(self.counts)
        lead, sizes = (len(pixels), self.groups), pixels.shape[2:]
        x_BGPC = pixels.reshape(*lead, self.channels, math.prod(sizes)).transpose(2, 3)
        inner = inner_products(x_BGPC, x_BGPC).reshape(*lead, *sizes, *sizes)
        # Products with padding are zeros; pixels behind all windows are cut off.
        axes = zip(self.padding, self.spans, sizes, strict=True)
        inner = _pad(inner, 2 * [(pad, span - pad - size) for pad, span, size in axes])
        for i in reversed(range(dims)):
            inner = self._added_up(inner, i, (2 + i, 2 + dims + i))
        depth = dot_depth(self.channels) + sum(self.kernel_size)
        return Gram(inner.reshape(*lead, self.positions, self.positions), self.window, depth)

    def _added_up(self, inner: Tensor, axis: int, dims: tuple[int, int]) -> Tensor:
        """Σ_δ of the entries (s·t + δ, s·u + δ) along one axis of both pixels."""
        stride, dilation = self.stride[axis], self.dilation[axis]

        def shifted(place: int) -> Tensor:
            at = [slice(None)] * inner.dim()
            for dim in dims:
                stop = place + (self.counts[axis] - 1) * stride + 1
                at[dim] = slice(place, stop, stride)
            return inner[tuple(at)]

        return added([shifted(k * dilation) for k in range(self.kernel_size[axis])])

    def at_positions(self, part: slice) -> Tensor:
        """The other side of some records, as (B, G, T, M)."""
        plain = piece(self.plain, part)
        return plain.reshape(len(plain), self.groups, self.others, self.positions).transpose(2, 3)

    def _padded(self, part: slice) -> Tensor:
        """The windowed side as its windows see it, padding included."""
        return _pad(piece(self.windowed, part), [(p, p) for p in self.padding])

    def _in_pieces(
        self, numbers: int, work: Callable[[slice], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """`work` piece by piece, where a group of a record needs so many numbers of workspace."""
        limit = 1 << (22 if self.plain.device.type == "cpu" else 26)  # a CPU's fit its cache
        return in_pieces(len(self.plain), self.groups * numbers, work, limit)


def _end_to_end(
    padded: Tensor, plain: Tensor, reach: int, stride: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Join the rows of a record, each with its padding, along the first axis of space.

    Then a record has one row with more positions. Windows that begin in one row and end in the next
    belong to none, so b is zero there. Each row's length is rounded up to a multiple of the stride,
    so that every row begins where a window does. A window reaches over `reach` pixels.
    """
    windows = max(-(-padded.shape[2] // stride), plain.shape[2])

    def joined(x: Tensor, length: int) -> Tensor:
        """(B·R, C, l, …) to (B, C, R·length, …), with zeros behind each row."""
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, length - x.shape[2]))
        return x.unflatten(0, (len(x) // rows, rows)).movedim(1, 2).flatten(2, 3)

    x, b = joined(padded, stride * windows), joined(plain, windows)
    return x, b.narrow(2, 0, (x.shape[2] - reach) // stride + 1)


def _pad(x: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros around each axis of space; a negative number cuts."""
    flat = [size for pair in reversed(sides) for size in pair]
    return F.pad(x, flat) if any(flat) else x


def _each(values: Sequence[int], dims: int) -> tuple[int, ...]:
    """One number for each axis; ATen accepts a single one for all."""
    return tuple(int(v) for v in values) if len(values) == dims else (int(values[0]),) * dims
