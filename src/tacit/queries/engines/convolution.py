"""Per-record gradients of convolutions and their transposes, in one, two or three dimensions.

A convolution is a linear layer on windows: with a_t the window (C·K numbers) that output position
t reads and b_t its output gradient, ∂/∂W = Σ_t b_t a_tᵀ, group by group. In a transposed
convolution input and output change places: the windows are those of the output gradient.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from tacit.queries.engines import convolution_triton
from tacit.queries.engines.ghost import ghost_norms
from tacit.queries.engines.rows import Contracted, RecordGradients, Stacked, pieces


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
        self._windowed = windowed
        self.plain = plain
        self.batch = len(plain)
        self.positions = plain[0, 0].numel() if self.batch else 0
        self.window = windowed.shape[1] // layer.groups * layer.weight[0, 0].numel()
        self.others = plain.shape[1] // layer.groups

    @cached_property
    def padded(self) -> Tensor:
        return _pad(self.layer, self._windowed)

    def gradients(self) -> RecordGradients:
        """Rows where they are smaller than what they come from, else norms and a contraction."""
        row = self.window * self.others * self.layer.groups
        kept_anyway = self._windowed[0].numel() + self.plain[0].numel()
        keep_rows = row <= 2 * kept_anyway
        if self._fused():
            return self._fused_gradients(keep_rows)
        if keep_rows:
            return Stacked(self.rows())
        ghost_work = self.positions**2 * (self.window + self.others)
        rows_work = self.positions * self.window * self.others
        ghostly = ghost_work < rows_work
        norms, reach = self._ghost_norms() if ghostly else self._norms_of_rows()
        coarse = self._coarse()
        # Ghost norms are never coarse; norms of rows are rounded as the rows were.
        roundings = 2 if coarse and not ghostly else 1
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

    def _fused_gradients(self, keep_rows: bool) -> RecordGradients:
        found, squares = convolution_triton.weight_gradients(
            self.layer, self.inputs, self.cotangent, store=keep_rows
        )
        if found is not None:
            return Stacked(found, squares)
        coarse = self._coarse()
        roundings = 2 if coarse else 1
        return Contracted(squares, self._reach(), self._contract, self.rows, coarse, roundings)

    def _reach(self) -> Tensor:
        """Σ_t ‖a_t‖·‖b_t‖; a window's squared length is a convolution of squares with ones."""
        layer = self.layer
        mass = self.inputs.square().sum(dim=1, keepdim=True)
        ones = mass.new_ones(1, 1, *layer.kernel_size)
        convolve = F.conv1d if len(layer.kernel_size) == 1 else F.conv2d
        lengths = convolve(mass, ones, None, layer.stride, layer.padding, layer.dilation)
        tiny = torch.finfo(mass.dtype).tiny  # squares may vanish; lengths must not
        others = self.cotangent.square().sum(dim=1, keepdim=True) + self.others * tiny
        products = (lengths.clamp_min(0) + self.window * tiny).sqrt() * others.sqrt()
        # The convolution may have been rounded to 10 bits.
        return products.flatten(1).sum(dim=1) * (1 + 2.0**-8)

    def rows(self) -> Tensor:
        parts = self._parts()
        if len(parts) == 1:
            return self._rows(parts[0])
        rows = self.plain.new_empty(self.batch, *self.layer.weight.shape)
        for part in parts:
            rows[part] = self._rows(part)
        return rows

    def _rows(self, part: slice) -> Tensor:
        with _same_precision_as_convolution(self.plain):
            product = self._plain(part).transpose(2, 3) @ self._windows(part)  # B G M W
        return product.reshape(len(product), *self.layer.weight.shape)

    def _norms_of_rows(self) -> tuple[Tensor, Tensor]:
        norms, reach = self.plain.new_empty(self.batch), self.plain.new_empty(self.batch)
        for part in self._parts():
            norms[part] = self._rows(part).flatten(1).square().sum(dim=1)
            tiny = torch.finfo(norms.dtype).tiny
            windows = (self._windows(part).square().sum(dim=3) + self.window * tiny).sqrt()
            others = (self._plain(part).square().sum(dim=3) + self.others * tiny).sqrt()
            reach[part] = (windows * others).sum(dim=(1, 2))
        return norms, reach

    def _ghost_norms(self) -> tuple[Tensor, Tensor]:
        """Σ over groups of Σ_{t,u} (a_t·a_u)(b_t·b_u), from above; see `ghost`."""
        norms, reach = self.plain.new_empty(self.batch), self.plain.new_empty(self.batch)
        for part in self._parts():
            norms[part], reach[part] = ghost_norms(self._windows(part), self._plain(part))
        return norms, reach

    def _contract(self, scale_B: Tensor) -> Tensor:
        """The weight gradient of the scaled batch, by the convolution's own backward pass."""
        shape = (self.batch,) + (1,) * (self.cotangent.dim() - 1)
        scaled = self.cotangent * scale_B.to(self.cotangent.dtype).view(shape)
        layer = self.layer
        zero_padded = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        dims = len(layer.kernel_size)
        return torch.ops.aten.convolution_backward(
            scaled,
            self.inputs if self.transposed or zero_padded else self.padded,
            layer.weight.detach().to(scaled.dtype),
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
        layer, x = self.layer, self.padded[part]
        dims = len(layer.kernel_size)
        for i, (size, stride, dilation) in enumerate(
            zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        ):
            count = self.plain.shape[2 + i]
            x = x.unfold(2 + i, (size - 1) * dilation + 1, stride)[..., ::dilation]
            x = x.narrow(2 + i, 0, count)
        # B, C, T…, K… → B, G, T…, C/G, K…
        x = x.unflatten(1, (layer.groups, -1))
        order = [0, 1, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims)]
        return x.permute(order).reshape(len(x), layer.groups, self.positions, self.window)

    def _plain(self, part: slice) -> Tensor:
        """The other side of some records, as (B, G, T, M)."""
        return self.plain[part].flatten(2).unflatten(1, (self.layer.groups, -1)).transpose(2, 3)

    def _parts(self) -> list[slice]:
        return pieces(self.batch, self.layer.groups * self.positions * self.window)

    def _coarse(self) -> bool:
        convolution = torch.backends.cudnn.allow_tf32
        return self.plain.is_cuda and self.plain.dtype == torch.float32 and convolution


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


class _same_precision_as_convolution:  # noqa: N801 (used as a function)
    """Matrix products of rows in TensorFloat-32 exactly where convolutions run in it.

    The norm is taken of the rows that come out, so the bound does not depend on it.
    """

    def __init__(self, like: Tensor) -> None:
        self._active = like.is_cuda and like.dtype == torch.float32

    def __enter__(self) -> None:
        if self._active:
            self._before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32

    def __exit__(self, *_: object) -> None:
        if self._active:
            torch.backends.cuda.matmul.allow_tf32 = self._before
