"""Max pooling.

y_w = max over window w, in each channel; a position is in at most M windows. In each window
|max a − max b| ≤ max|a − b| ≤ ‖a − b‖, so Σ_w (y_w − y'_w)² ≤ M·‖x − x'‖²: the constant is √M, and
1 where windows do not overlap. Reached: one number, the maximum of all M windows that it is in, is
copied M times. Padding is with −∞ and never wins, unless a window holds nothing else: refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from tacit.lipschitz.bounds import Bound, Parameterless
from tacit.lipschitz.refused import Refused
from tacit.lipschitz.windows import largest_adaptive_overlap, largest_overlap

_DIMS: dict[type[nn.Module], int] = {
    nn.MaxPool1d: 1,
    nn.MaxPool2d: 2,
    nn.MaxPool3d: 3,
    nn.AdaptiveMaxPool1d: 1,
    nn.AdaptiveMaxPool2d: 2,
    nn.AdaptiveMaxPool3d: 3,
}


class MaxPool(Parameterless):
    exact = True

    def __init__(self, module: nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d) -> None:
        self.module, self.dims = _checked(module)
        # PyTorch reads an empty stride, too, as the kernel size.
        stride = module.stride or module.kernel_size
        settings = (module.kernel_size, stride, module.padding, module.dilation)
        self.axes = list(zip(*(_each(value, self.dims) for value in settings), strict=True))

    def lipschitz(self, x: Bound) -> float:
        sizes = zip(*_sizes(self.module, x, self.dims), strict=True)
        each = zip(sizes, self.axes, strict=True)
        return math.sqrt(math.prod(largest_overlap(*size, *axis) for size, axis in each))


class AdaptiveMaxPool(Parameterless):
    exact = True

    def __init__(self, module: nn.Module) -> None:
        self.module, self.dims = _checked(module)

    def lipschitz(self, x: Bound) -> float:
        sizes = zip(*_sizes(self.module, x, self.dims), strict=True)
        return math.sqrt(math.prod(largest_adaptive_overlap(*size) for size in sizes))


def _checked(module: nn.Module) -> tuple[nn.Module, int]:
    if module.return_indices:
        raise Refused("returns indices too; build it without return_indices")
    return module, _DIMS[type(module)]


def _sizes(module: nn.Module, x: Bound, dims: int) -> tuple[Sequence[int], Sequence[int]]:
    after = module.forward(torch.zeros(1, *x.shape))
    if not after.isfinite().all():
        raise Refused(
            f"has a window without a pixel on a record of shape {x.shape}, whose maximum is −∞; "
            "change its padding, dilation or kernel_size"
        )
    return x.shape[-dims:], after.shape[-dims:]


def _each(value: int | Sequence[int], dims: int) -> Sequence[int]:
    return (value,) * dims if isinstance(value, int) else value
