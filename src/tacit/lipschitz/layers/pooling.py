"""Pooling by the L2 norm of each window."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tacit.lipschitz.bounds import Bound, Parameterless
from tacit.lipschitz.refused import Refused
from tacit.lipschitz.windows import largest_overlap


class ScaledL2NormPool2d(nn.Module, Parameterless):
    """y_w = ‖x restricted to window w‖/√M, in each channel, M = ⌈k_h/s_h⌉·⌈k_w/s_w⌉.

    |‖a‖ − ‖b‖| ≤ ‖a − b‖ in each window, and a pixel is in at most M windows, so
    Σ_w (y_w − y'_w)² ≤ Σ_w ‖x_w − x'_w‖²/M ≤ ‖x − x'‖²: 1-Lipschitz. Windows that do not overlap
    (M = 1, the default) and that cover the image keep the norm: ‖y‖ = ‖x‖. The output at 0 is 0,
    with no epsilon inside the root. What windows there are may overlap less than M.

    The norm has no derivative at 0, and near it squares underflow, x/‖x‖ computed in floating
    point then having any norm up to √(k_h·k_w). There the gradient is 0.
    """

    def __init__(
        self, kernel_size: int | tuple[int, int], stride: int | tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        self.kernel_size = _pair(kernel_size)
        self.stride = self.kernel_size if stride is None else _pair(stride)
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

    def extra_repr(self) -> str:
        return f"{self.kernel_size}, stride={self.stride}"

    def lipschitz(self, x: Bound) -> float:
        size = _image_size(x.shape, self.kernel_size)
        axes = list(zip(size, self.kernel_size, self.stride, strict=True))
        overlap = math.prod(largest_overlap(n, (n - k) // s + 1, k, s) for n, k, s in axes)
        return math.sqrt(overlap / self.most_windows)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _image_size(shape: tuple[int, ...], kernel: tuple[int, int]) -> tuple[int, int]:
    if len(shape) < 2 or shape[-2] < kernel[0] or shape[-1] < kernel[1]:
        raise Refused(f"ScaledL2NormPool2d of windows {kernel} on a record of shape {shape}")
    return shape[-2], shape[-1]
