"""Scalers as layers, so that a certificate is about the inputs as they were before them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from tacit.data.colour import LinearColour
from tacit.data.scaling import PublicScaler, RangeScaler, Scaler, UnitNorm
from tacit.lipschitz.bounds import Bound
from tacit.lipschitz.layers.inputs import BoundedInput


class ScalingLayer(nn.Module):
    """A scaler in front of a network, with its Lipschitz constant."""

    objects = ("scaler",)

    def __init__(self, scaler: Scaler) -> None:
        super().__init__()
        self.scaler, self.constant = scaler, scaler_lipschitz(scaler)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaler(x)

    def output_norm(self, x: Bound) -> float:
        return math.inf  # a mean is subtracted, and what comes in is not bounded anyway

    def lipschitz(self, x: Bound) -> float:
        return self.constant

    def gradient_norms(self, x: Bound, cotangent: float) -> dict[str, float]:
        return {}


def as_layers(before: Scaler | Iterable[Scaler]) -> list[nn.Module]:
    """The scalers in turn. Dividing a record by its norm is the sphere of radius 1."""
    scalers = (before,) if isinstance(before, Scaler) else before
    return [
        BoundedInput(1.0, sphere=True) if type(scaler) is UnitNorm else ScalingLayer(scaler)
        for scaler in scalers
    ]


def scaler_lipschitz(scaler: Scaler) -> float:
    """How far the scaled input moves at most, over how far the input does.

    (x − mean)/std: channel c moves by δ_c/std_c, so ‖·‖ ≤ ‖δ‖/min std. The *smallest* deviation
    decides: with the largest, as published code has it, a radius is too large by their ratio.
    A range onto another: clipping is 1-Lipschitz, then the steepest slope. A colour matrix: ‖M‖₂.
    """
    if type(scaler) is PublicScaler:
        assert isinstance(scaler.std, Tensor)
        return 1 / float(scaler.std.min())
    if type(scaler) is RangeScaler:
        assert isinstance(scaler.upper, Tensor)
        assert isinstance(scaler.lower, Tensor)
        low, high = scaler.onto
        return (high - low) / float((scaler.upper - scaler.lower).min())
    if isinstance(scaler, LinearColour):
        return scaler.lipschitz
    raise ValueError(
        f"{type(scaler).__name__} has no known Lipschitz constant, so nothing is known of the "
        "inputs before it; certify the scaled inputs by leaving it out of before="
    )
