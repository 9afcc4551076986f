"""Scalers rescale each record by itself, with constants that are public or with none at all.

`PublicScaler`, `RangeScaler` and `UnitNorm` are the usual ones; a scaler of your own subclasses
`Scaler`. `as_scalers` refuses what may have been fitted to private records.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tacit.errors import UndeclaredConstant

_CHUNK = 4096
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
        object.__setattr__(self, "mean", as_constants(self.mean, "mean"))
        object.__setattr__(self, "std", as_constants(self.std, "std"))
        assert isinstance(self.std, Tensor)
        if not (self.std > 0).all():
            raise ValueError(f"std has {self.std.min().item():g}; give numbers above 0")

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
    if scale == "fit":
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
    """values / divisor through the scalers in turn, as float32.

    A few thousand records at a time: CIFAR-10 as float32 is 600 MB, and one copy is enough.
    """

    def part(start: int) -> Tensor:
        inputs = torch.tensor(values[start : start + _CHUNK], dtype=torch.float32)
        if divisor != 1:
            inputs.div_(divisor)
        for scaler in scalers:
            inputs = scaler(inputs)
        return inputs

    first = part(0)
    result = torch.empty((len(values), *first.shape[1:]), dtype=torch.float32)
    result[:_CHUNK] = first
    for start in range(_CHUNK, len(values), _CHUNK):
        result[start : start + _CHUNK] = part(start)
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
