"""Convolutions that keep the norm of their input, made of factors that can be projected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tacit.lipschitz.bounds import Bound, Pullback, Walk
from tacit.lipschitz.convolution_sets import ReshapedKernel
from tacit.lipschitz.layers.convolution import SpectralConv1d, SpectralConv2d
from tacit.lipschitz.layers.shift import Shift
from tacit.lipschitz.layers.space_to_depth import SpaceToDepth


class _OrthogonalConv(nn.Module):
    """y = W₂·S·W₁·x: pointwise matrices W₁, W₂ with orthonormal columns or rows, S shifts channels.

    A product of orthogonal operators, so ‖y‖ = ‖x‖ under circular padding. It is a convolution
    with kernel K_δ = W₂·E_δ·W₁, E_δ selecting the channels that move by δ. Two offsets along
    one axis give W₂W₁(W₁ᵀ(1 − E)W₁ + W₁ᵀEW₁·z), the block (1 − P + P·z) with a projection P of
    which BCOP kernels are products [Li 2019], so chains of these layers contain them.

    W₁ and W₂ are what is trained and what is projected, each alone, and each is a linear layer
    used at every position: gradients at most X·G, without the √reads of a general kernel.

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
        kernel, steps = _each(kernel_size, dims), _each(stride, dims)
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


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value)
