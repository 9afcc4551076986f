"""Per-record gradients of convolution kernels, in one, two or three dimensions.

A convolution is a product with windows: with a_t the window (C·K numbers) that output position t
reads and b_t the cotangent there, ∂/∂W = Σ_t b_t a_tᵀ, group by group. A transposed convolution is
the same with its two sides exchanged: the windows are those of the cotangent, and the inputs stand
at the positions.

Rows are kept where they are small. Otherwise only norms are: from products of pixels or of windows
(`norms`), or of rows that are made and dropped, whichever `convolution_norms` finds cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.engines.convolution_norms import Axis, Way, cheapest, window_gram
from tacit.engines.gradients import (
    Contracted,
    RecordGradients,
    Scale,
    Stacked,
    by_pieces,
    piece,
    pieces,
    small_stack,
)
from tacit.engines.kernels import convolution as fused_kernel
from tacit.engines.kernels import ghost
from tacit.engines.norms import Gram, norms_from_grams, safe_squares, sum_of_squares
from tacit.engines.precision import cuts_convolutions, cuts_products, wide_together


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
        inputs: (B·R, C_in, …), the R rows of a record one after another.
        cotangent: (B·R, C_out, …), the gradient at the convolution's output.
        weight: the kernel, for its shape alone.
        rows_per_record: R. A record's gradient is the sum over its rows.
    """
    kernel_size = tuple(weight.shape[2:])
    dims = len(kernel_size)
    stride, padding, dilation = (_each(v, dims) for v in (stride, padding, dilation))
    inputs, cotangent = wide_together(inputs, cotangent)
    windowed, plain = (cotangent, inputs) if transposed else (inputs, cotangent)
    if transposed:
        extra = _each(output_padding, dims)
        if any(e >= s for e, s in zip(extra, stride, strict=True)):
            # So many output positions that no input reaches would make room for a window more.
            sides = zip(padding, extra, strict=True)
            windowed = _pad(windowed, [(p, p - e) for p, e in sides])
            padding = (0,) * dims
    if rows_per_record > 1:
        windowed, plain = _end_to_end(
            windowed, plain, kernel_size, stride, padding, dilation, rows_per_record
        )
        padding = (0,) * dims
    kernel = Kernel(windowed, plain, tuple(weight.shape), stride, padding, dilation, groups)
    return kernel.gradients()


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
        self.batch = len(self.plain)
        self.positions = math.prod(self.plain.shape[2:])
        self.channels = self.windowed.shape[1] // self.groups
        self.window = self.channels * math.prod(self.kernel_size)
        self.others = self.plain.shape[1] // self.groups
        sizes = (self.plain.shape[2:], self.kernel_size, self.stride, self.dilation)
        self.axes = [Axis(*axis) for axis in zip(*sizes, strict=True)]

    def gradients(self) -> RecordGradients:
        """Rows where they are smaller than what they come from, else norms and a contraction."""
        row = self.window * self.others * self.groups
        kept_anyway = sum(math.prod(side.shape[1:]) for side in (self.windowed, self.plain))
        fused = fused_kernel.fits(self.windowed, self.groups)
        if self.groups > 1 and self.channels == 1 and self.plain.is_cuda and len(self.axes) <= 2:
            return Stacked(self._rows_by_channel())
        # The GPU kernel gains nothing from larger rows; elsewhere they save a contraction.
        few = row <= (1 if fused else 2) * kept_anyway
        if few or small_stack(len(self.plain), row, self.plain.device):
            return self._fused_rows() if fused else Stacked(self.rows())
        if self.positions == 1:  # ‖b aᵀ‖ = ‖a‖·‖b‖, in each group
            return self._one_position()
        way = cheapest(
            self.axes,
            self.channels,
            self.others,
            self.groups,
            device=self.plain.device,
            fused=fused,
        )
        return self.norms_by(way, fused=fused)

    def norms_by(self, way: Way, *, fused: bool = False) -> Contracted:
        """Norms taken in one way, and totals by the convolution's own backward pass."""
        # Ghost norms have all digits; norms of rows are rounded as the rows were.
        coarse = int(cuts_convolutions(self.plain))
        if way is Way.WINDOWS and fused:
            norms, reach = ghost.convolution_ghost_norms(*self._fused_arguments()[:-1], self.groups)
        elif way is Way.ROWS and fused:
            norms, reach = self._fused_norms()
            coarse *= 2
        elif way is Way.ROWS:
            norms, reach = self._norms_of_rows()
            coarse += int(cuts_products(self.plain))
        else:
            norms, reach = self._ghost_norms(way)
        if self.plain.device.type != "cpu":
            reach = torch.maximum(reach, self.whole_reach())
        return Contracted(norms, reach, self._contract, self.rows, coarse)

    def rows(self) -> Tensor:
        parts = self._parts(self.positions * self.window)
        rows = [self._products(self.windows(part), self._others(part)) for part in parts]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).reshape(self.batch, *self.shape)

    def _rows_by_channel(self) -> Tensor:
        """Rows of a kernel that reads one channel per group, as one convolution.

        ∂W[c, k] = Σ_t a[c, s·t + d·k − p]·b[c, t] is itself a convolution: of a by b, with stride
        and dilation exchanged, and with a group for each channel of each record.
        """
        windowed, plain = self.windowed.flatten(0, 1)[None], self.plain.flatten(0, 1)[:, None]
        convolve = F.conv2d if len(self.axes) == 2 else F.conv1d
        rows = convolve(
            windowed,
            plain,
            stride=self.dilation,
            padding=self.padding,
            dilation=self.stride,
            groups=self.batch * self.groups,
        )
        for i, size in enumerate(self.kernel_size):
            rows = rows.narrow(2 + i, 0, size)
        return rows.reshape(self.batch, *self.shape)

    def _products(self, windows_BGTW: Tensor, plain_BGTM: Tensor) -> Tensor:
        return plain_BGTM.transpose(2, 3) @ windows_BGTW

    def _norms_of_rows(self) -> tuple[Tensor, Tensor]:
        """Norms of rows that are made and dropped; rows and share both round over T positions."""
        tiny = torch.finfo(self.plain.dtype).tiny

        def norms_of(part: slice) -> tuple[Tensor, Tensor]:
            windows, others = self.windows(part), self._others(part)
            norms = sum_of_squares(self._products(windows, others))
            length_a = (windows.square().sum(dim=3) + self.window * tiny).sqrt()
            length_b = (others.square().sum(dim=3) + self.others * tiny).sqrt()
            reach = (length_a * length_b).sum(dim=(1, 2))
            return safe_squares(norms, reach, 0, 2 * self.positions), reach

        workspace = self.window * (self.positions + 2 * self.others)
        return by_pieces(self._parts(workspace), norms_of)

    def _one_position(self) -> Contracted:
        every = slice(0, self.batch)
        sides = self.windows(every).squeeze(2), self._others(every).squeeze(2)
        a, b = (
            sum_of_squares(x_BGW.flatten(0, 1)).unflatten(0, x_BGW.shape[:2]) for x_BGW in sides
        )
        coarse = int(cuts_convolutions(self.plain))
        reach = (a * b).sqrt().sum(dim=1)
        if self.plain.device.type != "cpu":
            reach = torch.maximum(reach, self.whole_reach())
        return Contracted((a * b).sum(dim=1), reach, self._contract, self.rows, coarse)

    def _ghost_norms(self, way: Way) -> tuple[Tensor, Tensor]:
        """Σ over groups of Σ_{t,u} (a_t·a_u)(b_t·b_u), from above; see `norms`."""

        def norms_of(part: slice) -> tuple[Tensor, Tensor]:
            if way is Way.PIXELS:
                gram = window_gram(piece(self.windowed, part), self.groups, self.axes, self.padding)
            else:
                gram = Gram.of(self.windows(part))
            return norms_from_grams(gram, Gram.of(self._others(part)))

        pixels = math.prod(axis.span for axis in self.axes)
        workspace = 2 * pixels**2 if way is Way.PIXELS else self.positions * self.window
        return by_pieces(self._parts(workspace + 3 * self.positions**2), norms_of)

    def _fused_rows(self) -> Stacked:
        rows, squares = fused_kernel.convolution_rows(*self._fused_arguments())
        return Stacked(rows.movedim(-1, 2), self._fused_squares(squares))

    def _fused_norms(self) -> tuple[Tensor, Tensor]:
        squares = fused_kernel.convolution_squares(*self._fused_arguments())
        reach = self.reach()
        return safe_squares(self._fused_squares(squares), reach, 0, 2 * self.positions), reach

    def _fused_arguments(
        self,
    ) -> tuple[
        Tensor, Tensor, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool
    ]:
        sizes = self.kernel_size, self.stride, self.padding, self.dilation
        return self.windowed, self.plain, *sizes, cuts_convolutions(self.plain)

    def _fused_squares(self, squares: Tensor) -> Tensor:
        """From above: what the kernel's sums may have rounded off, and squares that vanished."""
        finfo = torch.finfo(squares.dtype)
        depth = fused_kernel.squares_depth(self.windowed, self.plain, self.kernel_size)
        return squares * (1 + (depth + 2) * finfo.eps / 2) + math.prod(self.shape) * finfo.tiny

    def reach(self) -> Tensor:
        """√n·‖a‖·‖b‖ where no pixel lies in more than n windows, which is no less than S.

        S = Σ_t ‖a_t‖‖b_t‖ ≤ (Σ_t ‖a_t‖²)^½·‖b‖, and Σ_t ‖a_t‖² counts each pixel at most n times.
        Only two lengths are needed for it, each one pass over memory.
        """
        windows = math.prod(axis.overlap for axis in self.axes)
        return self.whole_reach() * math.sqrt(windows)

    def whole_reach(self) -> Tensor:
        """‖a‖·‖b‖: a GPU may contract by Fourier transforms, which round at *all* positions.

        Where a is far from b their terms are zero, and so is S; what the transform adds is not.
        """
        a, b = (sum_of_squares(side).sqrt() for side in (self.windowed, self.plain))
        return a * b

    def _contract(self, scale: Scale) -> Tensor:
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
        x = self.padded(part)
        dims = len(self.axes)
        for i, axis in enumerate(self.axes):
            x = x.unfold(2 + i, (axis.kernel - 1) * axis.dilation + 1, axis.stride)
            x = x[..., :: axis.dilation].narrow(2 + i, 0, axis.count)
        # B, C, T…, K… → B, G, T…, C/G, K…
        x = x.unflatten(1, (self.groups, self.channels))
        order = [0, 1, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims)]
        return x.permute(order).reshape(len(x), self.groups, self.positions, self.window)

    def _others(self, part: slice) -> Tensor:
        """The other side of some records, as (B, G, T, M)."""
        plain = piece(self.plain, part)
        return plain.reshape(len(plain), self.groups, self.others, self.positions).transpose(2, 3)

    def padded(self, part: slice) -> Tensor:
        """The windowed side as its windows see it, padding included."""
        return _pad(piece(self.windowed, part), [(p, p) for p in self.padding])

    def _parts(self, numbers: int) -> list[slice]:
        """Slices of records for a workspace of so many numbers per group."""
        limit = 1 << (22 if self.plain.device.type == "cpu" else 26)  # a CPU's fit its cache
        return pieces(self.batch, self.groups * numbers, limit)


def _end_to_end(
    windowed: Tensor,
    plain: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    rows: int,
) -> tuple[Tensor, Tensor]:
    """The rows of a record, each with its padding, laid end to end along the first axis of space.

    So a record has one row with more positions, and nothing is made row by row. Windows that begin
    in one row and end in the next belong to none: b is zero there. A row's length is rounded up to
    a multiple of the stride, so that each begins where a window does.
    """
    padded = _pad(windowed, [(p, p) for p in padding])
    windows = max(-(-padded.shape[2] // stride[0]), plain.shape[2])
    x = _joined(_lengthened(padded, stride[0] * windows), rows)
    b = _joined(_lengthened(plain, windows), rows)
    reach = (kernel_size[0] - 1) * dilation[0] + 1
    return x, b.narrow(2, 0, (x.shape[2] - reach) // stride[0] + 1)


def _lengthened(x: Tensor, length: int) -> Tensor:
    """Zeros behind the first axis of space, up to `length`."""
    return F.pad(x, (0, 0) * (x.dim() - 3) + (0, length - x.shape[2]))


def _joined(x: Tensor, rows: int) -> Tensor:
    """(B·R, C, L, …) to (B, C, R·L, …)."""
    return x.unflatten(0, (len(x) // rows, rows)).movedim(1, 2).flatten(2, 3)


def _pad(x: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros around each axis of space; a negative number cuts."""
    flat = [size for pair in reversed(sides) for size in pair]
    return F.pad(x, flat) if any(flat) else x


def _each(values: Sequence[int], dims: int) -> tuple[int, ...]:
    """One number for each axis; ATen accepts a single one for all."""
    return tuple(int(v) for v in values) if len(values) == dims else (int(values[0]),) * dims
