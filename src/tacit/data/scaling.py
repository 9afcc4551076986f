"""Scalers map each record by itself, with constants that are public or with none at all.

`PublicScaler`, `RangeScaler` and `UnitNorm` are the usual ones. Colour maps give images other
coordinates, pixel by pixel; in some, images have norms that lie closer together, which wastes less
of a bound on the input's norm  [Béthune 2024, App. B.3]: `load("cifar10", scale=[YIQ(), …])`. A
scaler of your own subclasses `Scaler`. `as_scalers` refuses what may have been fitted to private
records.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tacit.errors import UndeclaredConstant, in_words

LUMA = (0.299, 0.587, 0.114)  # Y of ITU-R BT.601, §2.5.1
Constants = float | Sequence[float] | Tensor


class Scaler(abc.ABC):
    """Maps each record by itself, with constants that are not read off the records.

    What one record becomes never depends on another record, so scaling costs no privacy.
    """

    @abc.abstractmethod
    def __call__(self, inputs: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def describe(self) -> str:
        """A sentence for the run's report: what was done, and why its constants are public."""


@dataclass(frozen=True, eq=False)
class PublicScaler(Scaler):
    """(x - mean) / std, with constants whose owner declares them public.

    `mean` and `std` are one number, one per channel (the first dimension of a record), or one per
    feature. `origin` says where they come from; it is the reason why they may be used for free.
    """

    mean: Constants
    std: Constants
    origin: str = "declared public by the user"

    def __post_init__(self) -> None:
        mean, std = as_constants(self.mean, "mean"), as_constants(self.std, "std")
        if not (std > 0).all():
            raise ValueError(f"std has {std.min().item():g}; give numbers above 0")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    def __call__(self, inputs: Tensor) -> Tensor:
        inputs = as_float(inputs)
        return (inputs - align(self.mean, inputs, "mean")).div_(align(self.std, inputs, "std"))

    def describe(self) -> str:
        return f"inputs were standardised with a mean and a std {self.origin}"


@dataclass(frozen=True, eq=False)
class RangeScaler(Scaler):
    """Clips to [lower, upper] and maps that range linearly onto `onto`, [-1, 1] by default.

    The range is declared, not the smallest and largest value seen. A value that is not finite
    becomes the middle of the range.
    """

    lower: Constants
    upper: Constants
    onto: tuple[float, float] = (-1.0, 1.0)
    origin: str = "declared public by the user"

    def __post_init__(self) -> None:
        lower, upper = as_constants(self.lower, "lower"), as_constants(self.upper, "upper")
        if not (lower < upper).all():
            raise ValueError(
                f"lower is {self.lower}, upper is {self.upper}; each lower must be below its upper"
                + in_words("", " in --feature-range lower,upper")
            )
        if not self.onto[0] < self.onto[1]:
            raise ValueError(f"onto is {self.onto}; give (low, high) with low < high")
        object.__setattr__(self, "lower", lower)
        object.__setattr__(self, "upper", upper)

    def __call__(self, inputs: Tensor) -> Tensor:
        inputs = as_float(inputs)
        lower, upper = align(self.lower, inputs, "lower"), align(self.upper, inputs, "upper")
        low, high = self.onto
        share = (inputs.clamp(lower, upper) - lower).div_(upper - lower)
        share = torch.where(inputs.isfinite(), share, 0.5)
        return share.mul_(high - low).add_(low).clamp_(low, high)

    def describe(self) -> str:
        low, high = self.onto
        return f"inputs were clipped to a range {self.origin} and mapped onto [{low:g}, {high:g}]"


@dataclass(frozen=True)
class UnitNorm(Scaler):
    """x / ||x||, record by record. Zero stays zero; a record that is not finite becomes zero."""

    def __call__(self, inputs: Tensor) -> Tensor:
        inputs = as_float(inputs)
        return unit_rows(inputs.flatten(1)).reshape(inputs.shape) if inputs.numel() else inputs

    def describe(self) -> str:
        return "each input was divided by its own norm, which uses no constant and no other record"


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
        red, green, blue = _pixels(inputs).unbind(dim=1)
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
        red, green, blue = _pixels(inputs).unbind(dim=1)
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


def _pixels(inputs: Tensor) -> Tensor:
    if inputs.dim() != 4 or inputs.shape[1] != 3:
        raise ValueError(
            f"inputs have shape {tuple(inputs.shape)}; a colour map takes (records, 3, height, "
            "width), red, green and blue in [0, 1]"
        )
    return as_float(inputs)


def unit_rows(rows_BD: Tensor) -> Tensor:
    """Each row scaled to norm 1; a row that is zero or not finite becomes 0."""
    # By its largest entry first: the squares of huge or tiny numbers are not finite, or 0.
    largest_B1 = rows_BD.abs().amax(dim=1, keepdim=True)
    usable_B1 = largest_B1.isfinite() & (largest_B1 > 0)
    scaled = torch.where(usable_B1, rows_BD / largest_B1, 0.0)
    norms_B1 = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / norms_B1.clamp_min(1.0)


def as_float(inputs: Tensor) -> Tensor:
    return inputs if inputs.is_floating_point() else inputs.float()


def as_scalers(scale: object) -> tuple[Scaler, ...]:
    """The scalers to apply in turn. Anything fitted to the data, or possibly so, is refused."""
    if scale is None:
        return ()
    if isinstance(scale, Scaler):
        return (scale,)
    if isinstance(scale, list | tuple):
        return tuple(scaler for part in scale for scaler in as_scalers(part))
    kind = type(scale).__name__
    if isinstance(scale, str) and scale != "fit":
        raise ValueError(
            f"scale is {scale!r}; give 'public', None, or a scaler such as PublicScaler(mean, std)"
        )
    if isinstance(scale, str):
        why = "scale='fit' would compute a mean and a std from private records without a charge"
    elif any(hasattr(scale, name) for name in ("fit", "mean_", "scale_")):
        why = f"{kind} is fitted to data, and nothing says that it was public data"
    else:
        why = (
            f"cannot tell where the constants of {kind} come from (a scaler of your own subclasses "
            "tacit.data.scaling.Scaler)"
        )
    raise UndeclaredConstant(
        f"{why}; release a noisy mean and std with tacit.release_statistics and charge its event, "
        "or declare public constants with PublicScaler(mean, std) or RangeScaler(lower, upper)"
    )


def scaled(values: np.ndarray, scalers: Sequence[Scaler], divisor: float = 1.0) -> Tensor:
    """values / divisor through the scalers in turn, as float32."""

    def part_scaled(part: np.ndarray) -> Tensor:
        inputs = torch.tensor(part, dtype=torch.float32)
        if divisor != 1:
            inputs.div_(divisor)
        for scaler in scalers:
            inputs = scaler(inputs)
        return inputs

    return in_chunks(part_scaled, values)


def in_chunks(function: Callable[[Any], Tensor], rows: Any, size: int = 4096) -> Tensor:
    """function(rows), some thousand rows at a time.

    Intermediate results stay small: CIFAR-10 as float32 is 600 MB, and one copy is enough.
    """
    if torch.compiler.is_exporting():  # a graph has no number of records
        return function(rows)
    first = function(rows[:size])
    result = first.new_empty((len(rows), *first.shape[1:]))
    result[:size] = first
    for start in range(size, len(rows), size):
        result[start : start + size] = function(rows[start : start + size])
    return result


def as_constants(value: Constants, name: str) -> Tensor:
    """`value` as finite float64 numbers."""
    constants = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().clone()
    if not constants.isfinite().all():
        raise ValueError(f"{name} has a value that is not finite; give finite numbers")
    return constants


def align(constants: Constants, inputs: Tensor, name: str) -> Tensor:
    """The constants in the inputs' type, shaped to broadcast over (records, *record shape)."""
    assert isinstance(constants, Tensor)
    shape = tuple(inputs.shape[1:])
    if constants.numel() == 1:
        constants = constants.reshape(())
    elif constants.ndim == 1 and len(shape) > 1 and len(constants) == shape[0]:
        constants = constants.reshape(-1, *(1 for _ in shape[1:]))
    elif tuple(constants.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(constants.shape)} and a record has {shape}; "
            "give one number, one per channel, or one per feature"
        )
    return constants.to(inputs.device, inputs.dtype)
