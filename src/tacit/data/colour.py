"""Colour spaces: images of red, green and blue in [0, 1] in other coordinates, pixel by pixel.

A colour map reads no record but its own and no constant of the data, so it costs no privacy. Some
spaces give images norms that lie closer together, which wastes less of a bound on the input's norm
[Béthune 2024, App. B.3]. They are scalers: `load("cifar10", scale=[YIQ(), …])`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.data.scaling import Scaler, as_float

LUMA = (0.299, 0.587, 0.114)  # Y of ITU-R BT.601, §2.5.1


class LinearColour(Scaler):
    """p ↦ Mp for each pixel p = (R, G, B), with a fixed matrix M of one row per output channel.

    On an image it is block diagonal, one block per pixel, so its Lipschitz constant is ‖M‖₂.
    """

    rows: ClassVar[tuple[tuple[float, float, float], ...]]

    @property
    def matrix(self) -> Tensor:
        """M in float64."""
        return torch.tensor(self.rows, dtype=torch.float64)

    @property
    def lipschitz(self) -> float:
        """‖M‖₂: how far the image moves at most, over how far the pixels do."""
        return float(torch.linalg.matrix_norm(self.matrix, 2)) * (1 + 1e-12)

    def __call__(self, inputs: Tensor) -> Tensor:
        red, green, blue = _checked(inputs).unbind(dim=1)
        # Not a matrix product, whose rounding depends on how many records there are.
        return torch.stack([r * red + g * green + b * blue for r, g, b in self.rows], dim=1)

    def describe(self) -> str:
        return f"images were mapped from RGB to {type(self).__name__}, pixel by pixel"


@dataclass(frozen=True)
class RGB(LinearColour):
    """The images unchanged."""

    rows = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


@dataclass(frozen=True)
class YUV(LinearColour):
    """Luma and the two colour differences of PAL: U = (B − Y)·0.492111, V = (R − Y)·0.877283.

    The constants are those of SMPTE 170M, as in TensorFlow and scikit-image.
    """

    rows = (
        LUMA,
        (-0.14714119, -0.28886916, 0.43601035),
        (0.61497538, -0.51496512, -0.10001026),
    )


@dataclass(frozen=True)
class YIQ(LinearColour):
    """Luma and the two colour differences of NTSC: U and V turned by 33 degrees."""

    rows = (
        LUMA,
        (0.59590059, -0.27455667, -0.32134392),
        (0.21153661, -0.52273617, 0.31119955),
    )


@dataclass(frozen=True)
class Greyscale(LinearColour):
    """The luma alone: (B, 3, H, W) to (B, 1, H, W)."""

    rows = (LUMA,)


@dataclass(frozen=True)
class HSV(Scaler):
    """Hue, saturation and value, each in [0, 1]  [Smith 1978].

    V = max, S = (max − min)/max, and H is sixths of a turn: (G − B)/(max − min) where red is the
    largest, 2 + (B − R)/(max − min) for green, 4 + (R − G)/(max − min) for blue, modulo 6, over 6.
    A grey pixel has H = 0, a black one S = 0 too.

    It has no Lipschitz constant: near grey any hue is close by, and at red the hue jumps by 1. So
    no certificate passes through it.
    """

    def __call__(self, inputs: Tensor) -> Tensor:
        red, green, blue = _checked(inputs).unbind(dim=1)
        value = torch.maximum(torch.maximum(red, green), blue)
        spread = value - torch.minimum(torch.minimum(red, green), blue)
        over = torch.where(spread > 0, spread, 1.0)
        sixth = torch.where(
            value == red,
            (green - blue) / over,
            torch.where(value == green, 2 + (blue - red) / over, 4 + (red - green) / over),
        )
        hue = torch.where(spread > 0, (sixth / 6).remainder(1.0), 0.0)
        saturation = torch.where(value > 0, spread / torch.where(value > 0, value, 1.0), 0.0)
        return torch.stack([hue, saturation, value], dim=1)

    def describe(self) -> str:
        return "images were mapped from RGB to HSV, pixel by pixel"


def _checked(inputs: Tensor) -> Tensor:
    if inputs.dim() != 4 or inputs.shape[1] != 3:
        raise ValueError(
            f"inputs have shape {tuple(inputs.shape)}; a colour map takes (records, 3, height, "
            "width), red, green and blue in [0, 1]"
        )
    return as_float(inputs)
