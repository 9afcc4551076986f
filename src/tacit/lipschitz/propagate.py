"""Algorithm 1 of the clipless paper: bounds go through a network as values and gradients do.

Forwards, the largest norm of a record's activation; backwards, the largest norm of its cotangent,
which starts at the loss's Lipschitz constant. Where both are known, so is the largest norm of the
record's parameter gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tacit.errors import UnboundedLayer
from tacit.lipschitz.answers.pointwise import NEGLIGIBLE
from tacit.lipschitz.as_written import require_as_written, require_plain_gradients
from tacit.lipschitz.bounds import Bound, Bounded, Composite, Pullback, Walk
from tacit.lipschitz.known_modules import answers_of
from tacit.lipschitz.loss_constant import loss_constant
from tacit.lipschitz.precision import EXACT, Precision
from tacit.lipschitz.refused import Refused
from tacit.lipschitz.traced import walk_trace


@dataclass(frozen=True)
class LayerRow:
    """One use of one layer, as `tacit inspect` shows it."""

    name: str
    kind: str
    input_norm: float
    output_norm: float
    lipschitz: float
    cotangent: float
    gradient_norms: dict[str, float]


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
    require_as_written(model)
    require_plain_gradients(model)
    found = Sensitivities()
    walker = _Walker(model, precision, found)
    output, back = walker.walk(model, "", Bound(float(input_norm), tuple(input_shape)))
    found.output = output
    if isinstance(loss, int | float):
        found.cotangent = float(loss)
    else:
        found.cotangent = loss_constant(loss, math.prod(output.shape))
    back(found.cotangent)
    found.layers.reverse()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            found.by_parameter.pop(name, None)
            continue
        _require_finite(name, found, model)
    return found


def input_lipschitz(
    model: nn.Module, input_shape: Sequence[int], input_norm: float = math.inf
) -> float:
    """The Lipschitz constant of the outputs in the input: what a unit cotangent becomes.

    Of the forward pass, where `ClipGradient` is the identity and a function must not jump.
    """
    require_as_written(model)
    walker = _Walker(model, EXACT, Sensitivities(), clips=False)
    _, back = walker.walk(model, "", Bound(float(input_norm), tuple(input_shape)))
    return back(1.0)


class _Walker:
    def __init__(
        self, model: nn.Module, precision: Precision, found: Sensitivities, clips: bool = True
    ) -> None:
        self.clips = clips
        self.precision = precision
        self.found = found
        self.names = {id(p): n for n, p in model.named_parameters()}

    def walk(self, module: nn.Module, path: str, x: Bound) -> tuple[Bound, Pullback]:
        try:
            answers = answers_of(module)
            if answers is None:
                return walk_trace(module, path, x, self.walk)
            if isinstance(answers, Composite):
                return self._composite(module, answers, path, x)
            return self._leaf(module, answers, path, x)
        except Refused as refused:
            raise UnboundedLayer(
                f"layer {path or 'model'!r} ({type(module).__name__}) has no gradient bound: "
                f"{refused}"
            ) from refused

    def _composite(
        self, module: nn.Module, composite: Composite, path: str, x: Bound
    ) -> tuple[Bound, Pullback]:
        """What a composite adds up is rounded too, forwards and backwards."""
        out, back = composite.walk_bounds(x, self._into(module, path))
        slack = 0.0 if getattr(composite, "exact", False) else self.precision.slack
        rounded = Bound(out.norm * (1 + slack), out.shape)
        return rounded, lambda cotangent: back(cotangent) * (1 + slack)

    def _into(self, module: nn.Module, path: str) -> Walk:
        def walk(name: str, x: Bound) -> tuple[Bound, Pullback]:
            child = module.get_submodule(name)
            return self.walk(child, f"{path}.{name}" if path else name, x)

        return walk

    def _leaf(
        self, module: nn.Module, layer: Bounded, path: str, x: Bound
    ) -> tuple[Bound, Pullback]:
        if not self.clips:
            _require_no_jump(layer)
        slack = 0.0 if getattr(layer, "exact", False) else self.precision.slack
        out = Bound(layer.output_norm(x) * (1 + slack), shape_after(module, x.shape))
        lipschitz = layer.lipschitz(x) * (1 + slack)

        def back(cotangent: float) -> float:
            gradients = {
                name: norm * (1 + slack)
                for name, norm in layer.gradient_norms(x, cotangent).items()
            }
            for local, norm in gradients.items():
                name = self.names[id(module.get_parameter(local))]
                before = self.found.by_parameter.get(name, 0.0)
                self.found.by_parameter[name] = before + norm
            self.found.layers.append(
                LayerRow(
                    path or "model",
                    type(module).__name__,
                    x.norm,
                    out.norm,
                    lipschitz,
                    cotangent,
                    gradients,
                )
            )
            # 0 · ∞ is no bound at all, and a cotangent of 0 stays 0 through any layer.
            return _times(lipschitz, self._limited(layer, cotangent))

        return out, back

    def _limited(self, layer: Bounded, cotangent: float) -> float:
        """A layer may limit the cotangent that passes it (`ClipGradient`)."""
        limit = getattr(layer, "cotangent_limit", math.inf)
        return min(cotangent, limit) if self.clips else cotangent


def shape_after(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what `module` makes of one record, learnt by running two records of zeros.

    Two, so that a module that loses track of the records is noticed. They are where its parameters
    are, or its buffers.
    """
    held = itertools.chain(module.parameters(), module.buffers())
    like = next((tensor for tensor in held if tensor.is_floating_point()), None)
    probe = torch.zeros(2, *shape) if like is None else like.new_zeros(2, *shape)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            output = module(probe)
    finally:
        for part, training in modes:
            part.training = training
    if not isinstance(output, torch.Tensor) or output.dim() == 0 or len(output) != 2:
        raise UnboundedLayer(
            f"{type(module).__name__} does not keep one row a record; a bound is for one record"
        )
    return tuple(output.shape[1:])


def _require_finite(name: str, found: Sensitivities, model: nn.Module) -> None:
    bound = found.by_parameter.get(name)
    if bound is None:
        raise UnboundedLayer(
            f"parameter {name!r} is trained and no layer gives a bound for its gradient; freeze it "
            "with requires_grad_(False), or have its module answer for it"
        )
    if not math.isfinite(bound):
        first = next((row for row in found.layers if not math.isfinite(row.input_norm)), None)
        where = f" (it reaches layer {first.name!r})" if first else ""
        raise UnboundedLayer(
            f"parameter {name!r} has no finite gradient bound: the norm of the input is not "
            f"bounded{where}; begin the model with tacit.lipschitz.BoundedInput(max_norm)"
        )


def _require_no_jump(layer: Bounded) -> None:
    """A derivative may be bounded on both sides of a jump; the function's moves are not."""
    jump = getattr(layer, "jump", 0.0)
    if jump > NEGLIGIBLE:
        raise Refused(
            f"it jumps by {jump:.3g}, so it has no Lipschitz constant in its input; use "
            "nn.Softplus with a larger threshold, such as 20 for a beta of 1"
        )


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b
