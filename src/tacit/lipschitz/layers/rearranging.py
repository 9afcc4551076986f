"""Layers that only rearrange each record's numbers, which is exact, and L2-norm pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, Layer, per_axis
from tacit.lipschitz.torch_modules import largest_overlap


class _Rearrangement(Layer):
    exact = True


class Permute(_Rearrangement):
    """A record's axes in another order, numbered from 1: the batch stays where it is.

    `Permute(2, 1)` turns tokens (B, T, C) into (B, C, T), so that a linear layer mixes tokens.
    """

    shown = "order"

    def __init__(self, *order: int) -> None:
        super().__init__()
        if sorted(order) != list(range(1, len(order) + 1)):
            raise ValueError(
                f"Permute{order}: name each of a record's axes once, from 1; axis 0 is the batch"
            )
        self.order = tuple(order)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != len(self.order) + 1:
            raise Refused(f"Permute{self.order} of a record that has {x.dim() - 1} axes")
        return x.permute(0, *self.order)


class Reshape(_Rearrangement):
    """Each record in a shape of as many numbers. Unlike `view`, it cannot reach across records."""

    shown = "shape"

    def __init__(self, *shape: int) -> None:
        super().__init__()
        if any(size < 1 for size in shape):
            raise ValueError(f"Reshape{shape}: give each size of one record; nothing is inferred")
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        if math.prod(x.shape[1:]) != math.prod(self.shape):
            raise Refused(f"Reshape{self.shape} of a record of shape {tuple(x.shape[1:])}")
        return x.reshape(x.shape[0], *self.shape)


class Tokens(_Rearrangement):
    """Images (B, C, H, W) as tokens (B, H·W, C), one per position: the input of mixers."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 3:
            raise Refused(f"Tokens of a record that has {x.dim() - 1} axes; it needs positions")
        return x.flatten(2).transpose(1, 2)


class Shift(_Rearrangement):
    """Moves each channel by its own offset of a k₁ × … × k_r window: a convolution of norm 1.

    Runs of channels share an offset, evenly. On a torus (`circular`) it is a permutation; with
    zeros, what moves over the border is lost, and nothing grows  [Wu 2018].
    """

    shown = "window padding_mode"

    def __init__(self, window: Sequence[int], padding_mode: str = "circular") -> None:
        super().__init__()
        if padding_mode not in ("circular", "zeros"):
            raise ValueError(f"padding_mode is {padding_mode!r}; use circular or zeros")
        self.window, self.padding_mode = tuple(window), padding_mode
        reach = [range(-((k - 1) // 2), k // 2 + 1) for k in self.window]
        self.offsets = list(itertools.product(*reach))

    def forward(self, x: Tensor) -> Tensor:
        channels, count = x.shape[1], len(self.offsets)
        # Rounded to nearest, so that with few channels the middle of the window is not left out.
        ends = [(2 * channels * i + count) // (2 * count) for i in range(count + 1)]
        runs = x.split([b - a for a, b in itertools.pairwise(ends)], dim=1)
        pairs = zip(runs, self.offsets, strict=True)
        return torch.cat([self._move(run, by) for run, by in pairs if run.shape[1]], dim=1)

    def _move(self, run: Tensor, by: tuple[int, ...]) -> Tensor:
        if not any(by):
            return run
        if self.padding_mode == "circular":
            return run.roll(by, tuple(range(2, 2 + len(by))))
        # Padding on one side and cropping on the other; no more than there is.
        steps = [max(-n, min(step, n)) for step, n in zip(by, run.shape[2:], strict=True)]
        return F.pad(run, [amount for step in reversed(steps) for amount in (step, -step)])


class SpaceToDepth(_Rearrangement):
    """Blocks of s₁ × … × s_r pixels become channels: a permutation, so every norm is kept.

    (B, C, n₁, …) to (B, C·s₁⋯s_r, n₁/s₁, …), in the order of `torch.nn.PixelUnshuffle`
    [Jacobsen 2018]. Unlike pooling and strides, it downsamples without losing anything.
    """

    shown = "block"

    def __init__(self, block: int | Sequence[int], dims: int = 2) -> None:
        super().__init__()
        self.block = per_axis(block, dims)

    def forward(self, x: Tensor) -> Tensor:
        sizes = x.shape[2:]
        if any(n % s for n, s in zip(sizes, self.block, strict=True)):
            raise Refused(
                f"SpaceToDepth({self.block}) is given {tuple(sizes)} pixels; pad or crop them to a "
                "multiple of the block"
            )
        split = [n for size, s in zip(sizes, self.block, strict=True) for n in (size // s, s)]
        outer = range(2, 2 + 2 * len(sizes), 2)
        order = (0, 1, *(axis + 1 for axis in outer), *outer)
        parts = x.reshape(*x.shape[:2], *split).permute(order)
        return parts.flatten(1, 1 + len(sizes))


class ScaledL2NormPool2d(Layer):
    """y_w = ‖x restricted to window w‖/√M, in each channel, M = ⌈k_h/s_h⌉·⌈k_w/s_w⌉.

    |‖a‖ − ‖b‖| ≤ ‖a − b‖ in each window, and a pixel is in at most M windows, so
    Σ_w (y_w − y'_w)² ≤ Σ_w ‖x_w − x'_w‖²/M ≤ ‖x − x'‖²: 1-Lipschitz. Windows that do not overlap
    (M = 1, the default) and that cover the image keep the norm: ‖y‖ = ‖x‖. The output at 0 is 0,
    with no epsilon inside the root. The windows of a small image may overlap less than M.

    The norm has no derivative at 0. Near 0 squares underflow, and x/‖x‖ computed in floating point
    can have any norm up to √(k_h·k_w). There the gradient is 0.
    """

    shown = "kernel_size stride"

    def __init__(
        self, kernel_size: int | tuple[int, int], stride: int | tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        self.kernel_size = per_axis(kernel_size, 2)
        self.stride = self.kernel_size if stride is None else per_axis(stride, 2)
        if min(*self.kernel_size, *self.stride) < 1:
            raise ValueError(f"kernel {self.kernel_size}, stride {self.stride}: give at least 1")
        axes = zip(self.kernel_size, self.stride, strict=True)
        self.most_windows = math.prod(-(-kernel // stride) for kernel, stride in axes)

    def forward(self, x: Tensor) -> Tensor:
        _image_size(x.shape[1:], self.kernel_size)
        (kh, kw), (sh, sw) = self.kernel_size, self.stride
        windows = x.unfold(-2, kh, sh).unfold(-2, kw, sw)
        norms = torch.linalg.vector_norm(windows, dim=(-2, -1))
        # Half precision is summed in single. Above this, what underflows is below the rounding.
        wide = torch.finfo(torch.promote_types(x.dtype, torch.float32))
        steady = norms > math.sqrt(kh * kw * wide.tiny / wide.eps)
        return torch.where(steady, norms, norms.detach()) / math.sqrt(self.most_windows)

    def lipschitz(self, x: Bound) -> float:
        size = _image_size(x.shape, self.kernel_size)
        axes = zip(size, self.kernel_size, self.stride, strict=True)
        windows = [(n, [range(i, i + k) for i in range(0, n - k + 1, s)]) for n, k, s in axes]
        overlap = math.prod(largest_overlap(ranges, n) for n, ranges in windows)
        return math.sqrt(overlap / self.most_windows)


def _image_size(shape: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) < 2 or shape[-2] < kernel[0] or shape[-1] < kernel[1]:
        raise Refused(f"ScaledL2NormPool2d of windows {kernel} on a record of shape {shape}")
    return shape[-2], shape[-1]
