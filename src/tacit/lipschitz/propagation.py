"""Algorithm 1 of the clipless paper: bounds pass through a network as values and gradients do.

Forwards, the largest norm of a record's activation; backwards, the largest norm of its cotangent,
which starts at the loss's Lipschitz constant. Together they bound the norm of the record's
parameter gradients. The bounds are those of a program, the one that a query runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from rich.table import Table
from torch import nn

from tacit.errors import UnboundedLayer
from tacit.lipschitz.bounds import Bound
from tacit.lipschitz.integrity import require_plain_gradients
from tacit.lipschitz.program import Program, compile_program
from tacit.lipschitz.steps import LayerRow, Notes
from tacit.losses.record_loss import loss_constant
from tacit.precision import EXACT, Rounding


@dataclass(repr=False)
class Sensitivities:
    """Bounds on the norm of one record's gradient of each parameter, with a row for each layer.

    `output` bounds the outputs; `cotangent` is the bound at the outputs that the backward pass
    starts from.
    """

    by_parameter: dict[str, float] = field(default_factory=dict)
    layers: list[LayerRow] = field(default_factory=list)
    output: Bound = field(default_factory=lambda: Bound(0.0, ()))
    cotangent: float = math.inf

    def __repr__(self) -> str:
        bounds = ", ".join(f"{name}: {bound:.4g}" for name, bound in self.by_parameter.items())
        return f"Sensitivities(total={self.total():.4g}, {bounds})"

    def total(self) -> float:
        """(Σ_θ Δ_θ²)^(1/2): the sensitivity of the whole gradient."""
        return math.sqrt(math.fsum(v * v for v in self.by_parameter.values()))


def propagate(
    model: nn.Module,
    loss: object,
    input_shape: Sequence[int],
    input_norm: float = math.inf,
    rounding: Rounding = EXACT,
) -> Sensitivities:
    """Bounds on one record's gradient, for all weights within their layers' constraints.

    Args:
        model: a network, or one that is compiled already (`compile_program`).
        loss: a loss with a Lipschitz constant, or that constant: the largest norm of one record's
            loss gradient in the outputs.
        input_norm: a bound on the norm of a record; not needed behind a `BoundedInput`.

    The bound is on the gradient that adding or removing one record adds to the sum. A weight that
    is used twice has the sum of both bounds. Raises `UnboundedLayer` for a module without the three
    answers or with hooks, and for a trainable parameter without a finite bound.

        propagate(model, CrossEntropy(), input_shape=(1, 28, 28)).total()
    """
    program = model if isinstance(model, Program) else compile_program(model)
    require_plain_gradients(program.trained.items())
    notes = Notes(program.names, rounding)
    output, back = program.walk(notes, Bound(float(input_norm), tuple(input_shape)))
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
    """The Lipschitz constant of the outputs in the input: a unit cotangent, pulled back.

    It is that of the forward pass, where `ClipGradient` is the identity. A function that jumps is
    refused.
    """
    program = model if isinstance(model, Program) else compile_program(model)
    return output_and_lipschitz(program, Bound(float(input_norm), tuple(input_shape)))[1]


def output_and_lipschitz(program: Program, x: Bound) -> tuple[Bound, float]:
    """The bound on the outputs of records within `x`, and their Lipschitz constant in the input."""
    output, back = program.walk(Notes(program.names, clips=False), x)
    return output, back(1.0)


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


_TRIES = 8


def largest_entry(
    program: Program,
    bounds: Sensitivities,
    input_shape: Sequence[int],
    dtypes: Iterable[torch.dtype],
) -> float:
    """The largest |x_j| of a record for which no activation overflows; ∞ if none can.

    A network need not begin with `BoundedInput`: an activation such as tanh bounds its output. In
    front of it a finite record of 10³⁸ can become ∞ − ∞ = NaN, and one NaN voids the whole sum. So
    a record with an entry above this adds nothing, like one that is not finite.

    `bounds` are for inputs of any norm: if they are finite for all activations, none can overflow.
    Otherwise n entries of at most T have norm at most T·√n, which is propagated; T is lowered until
    all activations are below the cube root of the largest number of the narrowest of `dtypes`,
    7·10¹² for float32, since layers take squares and cubes. It depends on the layers' sets and not
    on any record.
    """
    if math.isfinite(_longest(bounds)):
        return math.inf
    limit = min(torch.finfo(dtype).max for dtype in dtypes) ** (1 / 3)
    entry = limit
    for _ in range(_TRIES):
        norm = entry * math.sqrt(math.prod(input_shape))
        finite = propagate(program, bounds.cotangent, input_shape, norm)
        longest = max(norm, _longest(finite))
        if longest <= limit:
            return entry
        if not math.isfinite(longest):
            break
        entry *= limit / (2 * longest)
    raise UnboundedLayer(
        "a layer has no bound on its output even where its input has one, so a record may overflow "
        "in it; begin the model with tacit.lipschitz.BoundedInput(max_norm)"
    )


def _longest(bounds: Sensitivities) -> float:
    return max((row.output_norm for row in bounds.layers), default=0.0)


def sensitivity_table(bounds: Sensitivities) -> Table:
    """One row per layer: bounds on its input, cotangent and gradients, and its Lipschitz constant.

    The share is Δ²/Σ Δ²: the part of the noise under `GlobalNoise` that is due to this layer.
    """
    table = Table(title="bounds for one record", title_justify="left")
    table.add_column("layer")
    table.add_column("kind")
    for name in ("input ≤", "Lipschitz", "cotangent ≤", "gradient ≤", "share of noise"):
        table.add_column(name, justify="right")
    total = bounds.total() ** 2
    for row in bounds.layers:
        gradient = math.sqrt(math.fsum(v * v for v in row.gradient_norms.values()))
        share = gradient**2 / total if total else 0.0
        cells = [row.input_norm, row.lipschitz, row.cotangent]
        own = [f"{gradient:.4g}", f"{share:.1%}"] if row.gradient_norms else ["–", "–"]
        table.add_row(row.name, row.kind, *(f"{cell:.4g}" for cell in cells), *own)
    table.caption = (
        f"outputs ≤ {bounds.output.norm:.4g}; all gradients together ≤ {bounds.total():.4g}"
    )
    return table
