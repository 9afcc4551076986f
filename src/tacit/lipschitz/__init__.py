"""Lipschitz networks: layers that know their constants, propagation of bounds, projection.

`propagate` bounds the gradient of one record, `project` keeps weights in their sets after a step,
`lipschitz_twin` converts an ordinary network, and `audit_layer` attacks a layer of your own. A
layer takes part by giving the three answers of `Bounded`, or `walk_bounds` if it is made of others.

What a layer answers is in `bounds`, `layers` and `torch_modules`; how weights keep to it in `sets`,
`projection` and `operator_norm`. `integrity`, `tracing`, `steps` and `program` compile a model into
the one program that is bounded (`propagation`) and run.
"""

from tacit.lipschitz import layers
from tacit.lipschitz.audit import AuditReport, Finding, audit_layer, audit_model
from tacit.lipschitz.bounds import Bound, Bounded, Composite, Parameterless
from tacit.lipschitz.layers import *  # noqa: F403
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
    *layers.__all__,
    "AuditReport", "Bound", "Bounded", "Composite", "Constraint", "Finding", "FrobeniusBall",
    "Orthogonal", "Parameterless", "ReshapedKernel", "Sensitivities", "SpectralBall",
    "TrueConvolution", "Twin", "audit_layer", "audit_model", "enforce", "input_lipschitz",
    "lipschitz_twin", "project", "propagate",
]  # fmt: skip
