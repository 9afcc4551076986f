"""Convolutions whose operator norm is bounded, and some that keep the norm of their input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, Pullback, Walk, per_axis
from tacit.lipschitz.layers.linear import ConstrainedWeight
from tacit.lipschitz.layers.rearranging import Shift, SpaceToDepth
from tacit.lipschitz.operator_norm import Axis
from tacit.lipschitz.sets import ReshapedKernel, TrueConvolution, WeightSet, shrunk
from tacit.torch_internals import Convolution, explicit_padding

KernelSet = Callable[[float, tuple[Axis, ...], int], WeightSet]


class _SpectralConv(ConstrainedWeight, Convolution):
    """y = K * x + c with ‖K * ·‖ ≤ max_norm as an operator and ‖c‖ ≤ max_bias.

    The bounds are those of `ConstrainedWeight`, with P output positions, X the norm of the whole
    image, and `reads` how often its most-read pixel is read (`Usage`): ∏⌈kᵢgᵢ/sᵢ⌉ under zero
    padding, g = gcd(s, d). With u_p the window at p, flattened, the kernel's gradient is
    Σ_p g_p u_pᵀ, and
      ‖Σ_p g_p u_pᵀ‖_F ≤ Σ_p ‖g_p‖‖u_p‖ ≤ G·(Σ_p ‖u_p‖²)^(1/2) ≤ G·√reads·X.
    It is reached under circular padding, by the image that is constant on the pixels a multiple
    of s apart: the windows are alike, and so their cotangents. Under zero padding it is
    reached up to the border: 0.99 of it on 16 pixels, 0.88 on 4, for k = 3. In groups the
    squares add up, ‖·‖² ≤ reads·Σ_h X_h²G_h² ≤ reads·X²G², with equality if one group has it all:
    a depthwise convolution has this constant too. Disjoint windows (kernel = stride) have
    reads = 1. The kernel's own scale is not in it, so no normalising factor divides it.

    `within` chooses the set: `TrueConvolution`, or the cheaper `ReshapedKernel`. Without
    `input_size` the kernel is bounded for images of every size on which padding copies no pixel
    more often than on large ones; others are refused. With it, the kernel is bounded for that size
    only, and is a few percent larger on small images. Zero and circular padding are the tight
    ones: reflecting and replicating cost a factor of 1.5 to 2.5.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        *,
        input_size: int | Sequence[int] | None = None,
        max_norm: float = 1.0,
        max_bias: float = 1.0,
        within: KernelSet = TrueConvolution,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        sizes: Any = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        super().__init__(*sizes, bias, padding_mode, device=device, dtype=dtype)  # type: ignore[misc, call-arg]
        self._limit(max_norm, max_bias)
        self.axes, self.groups_of_axes = axes_of(self, input_size), groups
        self.within = within(self.max_norm, self.axes, groups)
        if self.weight.is_meta:
            return  # `torch.nn.utils.skip_init` fills the weights later
        with torch.no_grad():
            # Orthonormal rows of each group's flattened kernel, or columns if there are fewer.
            for rows in self.weight.chunk(groups):
                rows.copy_(nn.init.orthogonal_(torch.empty_like(rows)))
            stack = self.within.project(self.weight[None])
            self.weight.copy_(shrunk(stack, self.within.norm_upper(stack), self.max_norm)[0])
            if self.bias is not None:
                self.bias.zero_()

    def lipschitz(self, x: Bound) -> float:
        self._require_covered(x)
        return super().lipschitz(x)

    def reads(self, x: Bound) -> int:
        self._require_covered(x)
        return math.prod(a.reads(n) for a, n in zip(self.axes, x.shape[1:], strict=True))

    def positions(self, x: Bound) -> int:
        return math.prod(a.outputs(n) for a, n in zip(self.axes, x.shape[1:], strict=True))

    def _require_covered(self, x: Bound) -> None:
        kind, sizes = type(self).__name__, x.shape[1:]
        declared = tuple(axis.size for axis in self.axes)
        # The set is that of the axes the layer was built with.
        if (axes_of(self, declared), self.groups) != (self.axes, self.groups_of_axes):
            raise Refused(
                f"the stride, padding, padding_mode, dilation, kernel or groups of this {kind} "
                "changed after it was built, and its bounds are those of before; build a new one"
            )
        if len(sizes) != len(self.axes):
            raise Refused(
                f"{kind} is given one record of shape {x.shape}; it needs channels and "
                f"{len(self.axes)} spatial axes"
            )
        if all(axis.covers(n) for axis, n in zip(self.axes, sizes, strict=True)):
            return
        if declared[0] is not None:
            raise Refused(
                f"{kind} is bounded for input_size={declared} and given {sizes}; declare the size "
                "that it is used with"
            )
        raise Refused(
            f"{kind} with {self.padding_mode} padding, stride {self.stride} and images of {sizes} "
            "uses a pixel more often than on large images that the stride divides; declare "
            f"input_size={sizes}"
        )


class SpectralConv1d(_SpectralConv, nn.Conv1d):
    """`nn.Conv1d` whose operator norm is at most `max_norm`; bounds: `_SpectralConv`."""


class SpectralConv2d(_SpectralConv, nn.Conv2d):
    """`nn.Conv2d` whose operator norm is at most `max_norm`; bounds: `_SpectralConv`."""


class SpectralConv3d(_SpectralConv, nn.Conv3d):
    """`nn.Conv3d` whose operator norm is at most `max_norm`; bounds: `_SpectralConv`."""


def axes_of(
    layer: Convolution, input_size: int | Sequence[int | None] | None = None
) -> tuple[Axis, ...]:
    """The axes of a PyTorch convolution with its present settings, of declared size or of any."""
    kernel = layer.weight.shape[2:]
    dims = len(kernel)
    sizes = [input_size] * dims if isinstance(input_size, int | None) else list(input_size)
    if len(sizes) != dims:
        raise ValueError(f"input_size is {input_size}; give {dims} numbers, channels left out")
    strides, dilations = per_axis(layer.stride, dims), per_axis(layer.dilation, dims)
    axes = []
    for i, (size, (before, after)) in enumerate(zip(sizes, _pads(layer, dims), strict=True)):
        if before < 0 or after < 0:
            raise Refused(f"padding is {before} and {after}; give numbers from 0")
        axis = Axis(kernel[i], strides[i], dilations[i], before, after, layer.padding_mode, size)
        if size is not None and axis.outputs(size) < 1:
            raise ValueError(f"input_size is {input_size}; no window of {axis.kernel} fits")
        axes.append(axis)
    return tuple(axes)


def _pads(layer: Convolution, dims: int) -> list[tuple[int, int]]:
    """Before and after each axis. PyTorch keeps a second copy, which zero padding does not read."""
    if layer.padding_mode != "zeros":
        pads = explicit_padding(layer)  # the last axis first, before and after in turn
        return [(pads[2 * i], pads[2 * i + 1]) for i in reversed(range(dims))]
    if layer.padding == "same":
        kernel, dilations = layer.weight.shape[2:], per_axis(layer.dilation, dims)
        missing = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in missing]
    amounts = 0 if layer.padding == "valid" else layer.padding
    return [(amount, amount) for amount in per_axis(amounts, dims)]  # type: ignore[arg-type]


class _OrthogonalConv(nn.Module):
    """y = W₂·S·W₁·x: pointwise matrices W₁, W₂ with orthonormal columns or rows, S shifts channels.

    A product of orthogonal operators, so ‖y‖ = ‖x‖ under circular padding. It is a convolution
    with kernel K_δ = W₂·E_δ·W₁, E_δ selecting the channels that move by δ. Two offsets along
    one axis give W₂W₁(W₁ᵀ(1 − E)W₁ + W₁ᵀEW₁·z), the block (1 − P + P·z) with a projection P of
    which BCOP kernels are products [Li 2019], so chains of these layers contain them.

    W₁ and W₂ are trained and projected, and each is a linear layer used at every position:
    gradients at most X·G, without the √reads of a general kernel.

    A stride s folds space into depth (orthogonal), and shifts over ⌈k/s⌉ cells of s pixels.
    In between there are m = max(in·∏s, out) channels, so that W₁ loses nothing. The norm is kept
    if out ≥ in·∏s. With fewer, or with zero padding, it does not grow.
    """

    conv: type[SpectralConv1d] | type[SpectralConv2d]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding_mode: str = "circular",
        *,
        max_norm: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        dims = 1 if issubclass(self.conv, nn.Conv1d) else 2
        kernel, steps = per_axis(kernel_size, dims), per_axis(stride, dims)
        folded = in_channels * math.prod(steps)
        middle = max(folded, out_channels)
        how: dict[str, Any] = {"within": ReshapedKernel, "device": device, "dtype": dtype}
        window = [-(-k // s) for k, s in zip(kernel, steps, strict=True)]
        layers: list[nn.Module] = [SpaceToDepth(steps)] if math.prod(steps) > 1 else []
        layers += [
            self.conv(folded, middle, 1, **how),
            Shift(window, padding_mode),
            self.conv(middle, out_channels, 1, max_norm=max_norm, **how),
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        return walk("layers", x)


class OrthogonalConv1d(_OrthogonalConv):
    """`_OrthogonalConv` on sequences (B, C, T)."""

    conv = SpectralConv1d


class OrthogonalConv2d(_OrthogonalConv):
    """`_OrthogonalConv` on images (B, C, H, W)."""

    conv = SpectralConv2d
