"""Layers with a known constant: they answer the three questions of `tacit.lipschitz.Bounded`."""

from tacit.lipschitz.layers.activations import Absolute, FullSort, GroupSort, Householder, MaxMin
from tacit.lipschitz.layers.branches import (
    AverageResidual,
    Concatenate,
    ConvexResidual,
    Residual,
    Sum,
)
from tacit.lipschitz.layers.convolution_layers import (
    OrthogonalConv1d,
    OrthogonalConv2d,
    SpectralConv1d,
    SpectralConv2d,
    SpectralConv3d,
)
from tacit.lipschitz.layers.limits import BoundedInput, ClipGradient, LayerCentering, Scale
from tacit.lipschitz.layers.linear import AddBias, FrobeniusLinear, SpectralLinear
from tacit.lipschitz.layers.rearranging import (
    Permute,
    Reshape,
    ScaledL2NormPool2d,
    Shift,
    SpaceToDepth,
    Tokens,
)

__all__ = [
    "Absolute", "AddBias", "AverageResidual", "BoundedInput", "ClipGradient", "Concatenate",
    "ConvexResidual", "FrobeniusLinear", "FullSort", "GroupSort", "Householder", "LayerCentering",
    "MaxMin", "OrthogonalConv1d", "OrthogonalConv2d", "Permute", "Reshape", "Residual", "Scale",
    "ScaledL2NormPool2d", "Shift", "SpaceToDepth", "SpectralConv1d", "SpectralConv2d",
    "SpectralConv3d", "SpectralLinear", "Sum", "Tokens",
]  # fmt: skip
