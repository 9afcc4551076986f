"""Algorithm 1 of the clipless paper: bounds go through a network as values and gradients do.

Forwards, the largest norm of a record's activation; backwards, the largest norm of its cotangent,
which starts at the loss's Lipschitz constant. Where both are known, so is the largest norm of the
record's parameter gradient. The bounds are those of a program, the one that a query runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from tacit.errors import UnboundedLayer
from tacit.lipschitz.bounds import Bound
from tacit.lipschitz.integrity import require_plain_gradients
from tacit.lipschitz.loss_constant import loss_constant
from tacit.lipschitz.precision import EXACT, Precision
from tacit.lipschitz.program import Program, compile_program
from tacit.lipschitz.steps import LayerRow, Notes


@dataclass
class Sensitivities:
    """The largest norm of one record's gradient of each parameter, and how it came about."""

    by_parameter: dict[str, float] = field(default_factory=dict)
    layers: list[LayerRow] = field(default_factory=list)
    output: Bound = field(default_factory=lambda: Bound(0.0, ()))
    cotangent: float = math.inf  # of the outputs: where the way back begins

    def total(self) -> float:
        """(Σ_θ Δ_θ²)^(1/2): the sensitivity of the whole gradient."""
        return math.sqrt(math.fsum(v * v for v in self.by_parameter.values()))


def propagate(
    model: nn.Module,
    loss: object,
    input_shape: Sequence[int],
    input_norm: float = math.inf,
    precision: Precision = EXACT,
) -> Sensitivities:
    """Bounds of one record's gradient, for weights within their layers' constraints.

    `loss` is a loss with a Lipschitz constant, or that constant: the largest norm of one record's
    loss gradient in the outputs. The input's norm is unknown (∞) unless `input_norm` is given; a
    `BoundedInput` at the front makes it known. A weight used twice has the sum of both bounds.
    Raises `UnboundedLayer` for a module without the three answers or with hooks, and for a
    trainable parameter that would have no finite bound.
    """
    return sensitivities_of(compile_program(model), loss, input_shape, input_norm, precision)


def sensitivities_of(
    program: Program,
    loss: object,
    input_shape: Sequence[int],
    input_norm: float = math.inf,
    precision: Precision = EXACT,
) -> Sensitivities:
    """`propagate` for a model that was compiled."""
    require_plain_gradients(program.trained.items())
    notes = Notes(program.names, precision)
    output, back = program.walk(Bound(float(input_norm), tuple(input_shape)), notes)
    if isinstance(loss, int | float):
        cotangent = float(loss)
    else:
        cotangent = loss_constant(loss, math.prod(output.shape))
    back(cotangent)
    rows = notes.layers[::-1]
    for name in program.trained:
        _require_finite(name, notes.by_parameter.get(name), rows)
    trained = {n: b for n, b in notes.by_parameter.items() if n in program.trained}
    return Sensitivities(trained, rows, output, cotangent)


def input_lipschitz(
    model: nn.Module, input_shape: Sequence[int], input_norm: float = math.inf
) -> float:
    """The Lipschitz constant of the outputs in the input: what a unit cotangent becomes.

    Of the forward pass, where `ClipGradient` is the identity and a function must not jump.
    """
    program = model if isinstance(model, Program) else compile_program(model)
    notes = Notes(program.names, clips=False)
    _, back = program.walk(Bound(float(input_norm), tuple(input_shape)), notes)
    return back(1.0)


def _require_finite(name: str, bound: float | None, rows: list[LayerRow]) -> None:
    if bound is None:
        raise UnboundedLayer(
            f"parameter {name!r} is trained and no layer gives a bound for its gradient; freeze it "
            "with requires_grad_(False), or have its module answer for it"
        )
    if not math.isfinite(bound):
        first = next((row for row in rows if not math.isfinite(row.input_norm)), None)
        where = f" (it reaches layer {first.name!r})" if first else ""
        raise UnboundedLayer(
            f"parameter {name!r} has no finite gradient bound: the norm of the input is not "
            f"bounded{where}; begin the model with tacit.lipschitz.BoundedInput(max_norm)"
        )
