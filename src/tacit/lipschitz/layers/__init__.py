"""Layers with a known constant, one file per kind."""

from tacit.lipschitz.layers.absolute import Absolute
from tacit.lipschitz.layers.bias import AddBias
from tacit.lipschitz.layers.branches import Concatenate, Sum
from tacit.lipschitz.layers.centering import LayerCentering
from tacit.lipschitz.layers.clip_gradient import ClipGradient
from tacit.lipschitz.layers.convolution import SpectralConv1d, SpectralConv2d, SpectralConv3d
from tacit.lipschitz.layers.frobenius import FrobeniusLinear
from tacit.lipschitz.layers.householder import Householder
from tacit.lipschitz.layers.inputs import BoundedInput
from tacit.lipschitz.layers.linear import SpectralLinear
from tacit.lipschitz.layers.orthogonal_convolution import OrthogonalConv1d, OrthogonalConv2d
from tacit.lipschitz.layers.pooling import ScaledL2NormPool2d
from tacit.lipschitz.layers.rearranging import Permute, Reshape, Tokens
from tacit.lipschitz.layers.residual import AverageResidual, ConvexResidual, Residual
from tacit.lipschitz.layers.scaling import Scale
from tacit.lipschitz.layers.shift import Shift
from tacit.lipschitz.layers.sorting import FullSort, GroupSort, MaxMin
from tacit.lipschitz.layers.space_to_depth import SpaceToDepth

__all__ = [
    "Absolute",
    "AddBias",
    "AverageResidual",
    "BoundedInput",
    "ClipGradient",
    "Concatenate",
    "ConvexResidual",
    "FrobeniusLinear",
    "FullSort",
    "GroupSort",
    "Householder",
    "LayerCentering",
    "MaxMin",
    "OrthogonalConv1d",
    "OrthogonalConv2d",
    "Permute",
    "Reshape",
    "Residual",
    "Scale",
    "ScaledL2NormPool2d",
    "Shift",
    "SpaceToDepth",
    "SpectralConv1d",
    "SpectralConv2d",
    "SpectralConv3d",
    "SpectralLinear",
    "Sum",
    "Tokens",
]
