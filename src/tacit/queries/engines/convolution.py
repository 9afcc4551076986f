"""Per-record gradients of convolutions and their transposes, in one, two or three dimensions.

A convolution is a linear layer on windows: with a_t the window (C·K numbers) that output position
t reads and b_t its output gradient, ∂/∂W = Σ_t b_t a_tᵀ, group by group. In a transposed
convolution input and output change places: the windows are those of the output gradient.

Rows are kept where they are small. Else only norms are: from products of pixels or of windows
(`ghost`), or of rows that are made and dropped, whichever `convolution_cost` finds cheapest.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from tacit.queries.engines import convolution_triton
from tacit.queries.engines.convolution_cost import Way, cheapest
from tacit.queries.engines.convolution_gram import Axis, window_gram
from tacit.queries.engines.ghost import Gram, norms_from_grams
from tacit.queries.engines.rows import Contracted, RecordGradients, Stacked, pieces
from tacit.queries.engines.scaling import present, scaled
from tacit.tensor_float import matmul_like_convolution, uses_tensor_float


def convolution_gradients(
    layer: _ConvNd, wanted: set[str], inputs: Tensor, cotangent: Tensor
) -> dict[str, RecordGradients]:
    found: dict[str, RecordGradients] = {}
    if "weight" in wanted:
        found["weight"] = _Kernel(layer, inputs, cotangent).gradients()
    if "bias" in wanted:
        found["bias"] = Stacked(cotangent.flatten(2).sum(dim=2))
    return found


class _Kernel:
    """The kernel's gradients: windows of one side, positions of the other.

    B records, G groups, T positions, W = channels × kernel size of a window, M = channels of the
    side that is not windowed, both in one group.
    """

    def __init__(self, layer: _ConvNd, inputs: Tensor, cotangent: Tensor) -> None:
        self.layer = layer
        self.transposed = isinstance(layer, _ConvTransposeNd)
        windowed, plain = (cotangent, inputs) if self.transposed else (inputs, cotangent)
        self.inputs, self.cotangent = inputs, cotangent
        self.windowed, self.plain = windowed, plain
        self.batch = len(plain)
        self.positions = plain[0, 0].numel() if self.batch else 0
        self.channels = windowed.shape[1] // layer.groups
        self.window = self.channels * layer.weight[0, 0].numel()
        self.others = plain.shape[1] // layer.groups
        self.axes = [
            Axis(*sizes)
            for sizes in zip(
                plain.shape[2:], layer.kernel_size, layer.stride, layer.dilation, strict=True
            )
        ]

    def gradients(self) -> RecordGradients:
        """Rows where they are smaller than what they come from, else norms and a contraction."""
        row = self.window * self.others * self.layer.groups
        kept_anyway = self.windowed[0].numel() + self.plain[0].numel()
        fused = self._fused()
        # The GPU kernel gains nothing from larger rows; elsewhere they save a contraction.
        if row <= (1 if fused else 2) * kept_anyway:
            return self._fused_rows() if fused else Stacked(self.rows())
        device = self.plain.device
        shape = self.axes, self.channels, self.others, self.layer.groups
        way = cheapest(*shape, device=device, fused=fused)
        if way is Way.ROWS and fused:
            norms, reach = self._fused_norms()
        else:
            norms, reach = self._norms_of_rows() if way is Way.ROWS else self._ghost_norms(way)
            if device.type != "cpu":
                reach = torch.maximum(reach, self._whole_reach())
        coarse = self._coarse()
        # Ghost norms are never coarse; norms of rows are rounded as the rows were.
        roundings = 2 if coarse and way is Way.ROWS else 1
        return Contracted(norms, reach, self._contract, self.rows, coarse, roundings)

    def _fused(self) -> bool:
        """Whether the GPU kernel can do this layer."""
        layer = self.layer
        return (
            convolution_triton.AVAILABLE
            and self.plain.is_cuda
            and self.plain.dtype == torch.float32
            and not self.transposed
            and layer.groups == 1
            and len(layer.kernel_size) < 3
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )

    def _fused_rows(self) -> Stacked:
        rows, squares = convolution_triton.weight_gradients(
            self.layer, self.inputs, self.cotangent, store=True
        )
        assert rows is not None
        return Stacked(rows, squares)

    def _fused_norms(self) -> tuple[Tensor, Tensor]:
        _, squares = convolution_triton.weight_gradients(
            self.layer, self.inputs, self.cotangent, store=False
        )
        return squares, self._reach()

    def _reach(self) -> Tensor:
        """√n·‖a‖·‖b‖ where no pixel lies in more than n windows, which is no less than S.

        S = Σ_t ‖a_t‖‖b_t‖ ≤ (Σ_t ‖a_t‖²)^½·‖b‖, and Σ_t ‖a_t‖² counts each pixel at most n times.
        Of S only two lengths are needed so, each one pass over memory.
        """
        windows = math.prod(axis.overlap for axis in self.axes)
        # The lengths are sums of squares, whose terms are rounded some hundred times at most.
        return self._whole_reach() * (math.sqrt(windows) * (1 + 2.0**-16))

    def _whole_reach(self) -> Tensor:
        """‖a‖·‖b‖: a GPU may contract by Fourier transforms, which round at *all* positions.

        Where a is far from b their terms are zero, and so is S; what the transform adds is not.
        """
        zeros = self.transposed or self.layer.padding_mode == "zeros"
        sides = (self.windowed if zeros else self._padded(slice(None)), self.plain)
        least = torch.finfo(self.plain.dtype).tiny ** 0.5  # squares may vanish; lengths must not
        a, b = (torch.linalg.vector_norm(x.flatten(1), dim=1) for x in sides)
        return (a + least * sides[0][0].numel() ** 0.5) * (b + least * sides[1][0].numel() ** 0.5)

    def rows(self) -> Tensor:
        parts = self._parts(self.positions * self.window)
        if len(parts) == 1:
            return self._rows(parts[0])
        rows = self.plain.new_empty(self.batch, *self.layer.weight.shape)
        for part in parts:
            rows[part] = self._rows(part)
        return rows

    def _rows(self, part: slice) -> Tensor:
        product = self._products(self._windows(part), self._plain(part))
        return product.reshape(len(product), *self.layer.weight.shape)

    def _products(self, windows_BGTW: Tensor, plain_BGTM: Tensor) -> Tensor:
        # The norm is taken of the rows that come out, so the bound does not depend on it.
        with matmul_like_convolution() if self.plain.is_cuda else nullcontext():
            return plain_BGTM.transpose(2, 3) @ windows_BGTW

    def _norms_of_rows(self) -> tuple[Tensor, Tensor]:
        norms, reach = self.plain.new_empty(self.batch), self.plain.new_empty(self.batch)
        tiny = torch.finfo(norms.dtype).tiny
        for part in self._parts(self.window * (self.positions + 2 * self.others)):
            windows, others = self._windows(part), self._plain(part)
            norms[part] = self._products(windows, others).flatten(1).square().sum(dim=1)
            length_a = (windows.square().sum(dim=3) + self.window * tiny).sqrt()
            length_b = (others.square().sum(dim=3) + self.others * tiny).sqrt()
            reach[part] = (length_a * length_b).sum(dim=(1, 2))
        return norms, reach

    def _ghost_norms(self, way: Way) -> tuple[Tensor, Tensor]:
        """Σ over groups of Σ_{t,u} (a_t·a_u)(b_t·b_u), from above; see `ghost`."""
        norms, reach = self.plain.new_empty(self.batch), self.plain.new_empty(self.batch)
        by_pixels = way is Way.PIXELS
        pixels = math.prod(axis.span for axis in self.axes)
        workspace = 2 * pixels**2 if by_pixels else self.positions * self.window
        for part in self._parts(workspace + 3 * self.positions**2):
            if by_pixels:
                gram = window_gram(self._padded(part), self.layer.groups, self.axes)
            else:
                gram = Gram.of(self._windows(part))
            norms[part], reach[part] = norms_from_grams(gram, Gram.of(self._plain(part)))
        return norms, reach

    def _contract(self, scale_B: Tensor) -> Tensor:
        """The weight gradient of the scaled batch, by the convolution's own backward pass."""
        cotangent = scaled(self.cotangent, scale_B)
        layer = self.layer
        zero_padded = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        dims = len(layer.kernel_size)
        inputs = self.inputs if self.transposed or zero_padded else self._padded(slice(None))
        return torch.ops.aten.convolution_backward(
            cotangent,
            present(inputs, scale_B),
            layer.weight.detach().to(cotangent.dtype),
            None,
            layer.stride,
            layer.padding if self.transposed or zero_padded else (0,) * dims,
            layer.dilation,
            self.transposed,
            layer.output_padding,
            layer.groups,
            [False, True, False],
        )[1]

    def _windows(self, part: slice) -> Tensor:
        """The windows of some records, as (B, G, T, W)."""
        layer, x = self.layer, self._padded(part)
        dims = len(self.axes)
        for i, axis in enumerate(self.axes):
            x = x.unfold(2 + i, (axis.kernel - 1) * axis.dilation + 1, axis.stride)
            x = x[..., :: axis.dilation].narrow(2 + i, 0, axis.count)
        # B, C, T…, K… → B, G, T…, C/G, K…
        x = x.unflatten(1, (layer.groups, -1))
        order = [0, 1, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims)]
        return x.permute(order).reshape(len(x), layer.groups, self.positions, self.window)

    def _plain(self, part: slice) -> Tensor:
        """The other side of some records, as (B, G, T, M)."""
        return self.plain[part].flatten(2).unflatten(1, (self.layer.groups, -1)).transpose(2, 3)

    def _padded(self, part: slice) -> Tensor:
        return _pad(self.layer, self.windowed[part])

    def _parts(self, numbers: int) -> list[slice]:
        """Slices of records for a workspace of so many numbers a group."""
        limit = 1 << (22 if self.plain.device.type == "cpu" else 25)  # a CPU's fit its cache
        return pieces(self.batch, self.layer.groups * numbers, limit)

    def _coarse(self) -> bool:
        single = self.plain.dtype == torch.float32
        return single and uses_tensor_float("convolution", self.plain.device)


def _pad(layer: _ConvNd, x: Tensor) -> Tensor:
    """The windowed side as its windows see it, padding included."""
    if isinstance(layer, _ConvTransposeNd):
        padding = [p for p in reversed(tuple(map(int, layer.padding))) for _ in range(2)]
        # Output positions that no input reaches lie past the end; windows must still fit.
        return F.pad(x, padding)
    both_sides = list(layer._reversed_padding_repeated_twice)
    if not any(both_sides):
        return x
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, both_sides, mode=mode)
