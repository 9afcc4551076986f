"""Lipschitz networks: layers that know their constants, propagation of bounds, projection."""

from tacit.lipschitz.audit import AuditReport, Finding, audit_layer, audit_model
from tacit.lipschitz.bounds import Bound, Bounded, Composite, Parameterless
from tacit.lipschitz.layers.activations import Absolute, FullSort, GroupSort, Householder, MaxMin
from tacit.lipschitz.layers.branches import (
    AverageResidual,
    Concatenate,
    ConvexResidual,
    Residual,
    Sum,
)
from tacit.lipschitz.layers.clip_gradient import ClipGradient
from tacit.lipschitz.layers.convolution_layers import (
    OrthogonalConv1d,
    OrthogonalConv2d,
    SpectralConv1d,
    SpectralConv2d,
    SpectralConv3d,
)
from tacit.lipschitz.layers.inputs import BoundedInput, LayerCentering, Scale
from tacit.lipschitz.layers.linear import AddBias, FrobeniusLinear, SpectralLinear
from tacit.lipschitz.layers.rearranging import (
    Permute,
    Reshape,
    ScaledL2NormPool2d,
    Shift,
    SpaceToDepth,
    Tokens,
)
from tacit.lipschitz.projection import Constraint, enforce, project
from tacit.lipschitz.propagation import Sensitivities, input_lipschitz, propagate
from tacit.lipschitz.sets import (
    FrobeniusBall,
    Orthogonal,
    ReshapedKernel,
    SpectralBall,
    TrueConvolution,
)
from tacit.lipschitz.twin import Twin, lipschitz_twin

__all__ = [
    "Absolute",
    "AddBias",
    "AuditReport",
    "AverageResidual",
    "Bound",
    "Bounded",
    "BoundedInput",
    "ClipGradient",
    "Composite",
    "Concatenate",
    "Constraint",
    "ConvexResidual",
    "Finding",
    "FrobeniusBall",
    "FrobeniusLinear",
    "FullSort",
    "GroupSort",
    "Householder",
    "LayerCentering",
    "MaxMin",
    "Orthogonal",
    "OrthogonalConv1d",
    "OrthogonalConv2d",
    "Parameterless",
    "Permute",
    "Reshape",
    "ReshapedKernel",
    "Residual",
    "Scale",
    "ScaledL2NormPool2d",
    "Sensitivities",
    "Shift",
    "SpaceToDepth",
    "SpectralBall",
    "SpectralConv1d",
    "SpectralConv2d",
    "SpectralConv3d",
    "SpectralLinear",
    "Sum",
    "Tokens",
    "TrueConvolution",
    "Twin",
    "audit_layer",
    "audit_model",
    "enforce",
    "input_lipschitz",
    "lipschitz_twin",
    "project",
    "propagate",
]
