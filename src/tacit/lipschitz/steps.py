"""The steps of a program: what each computes, and how a bound passes through it.

`forward` computes and `walk` sends a bound through; both are of one object. What a step computes is
the forward of a class on a snapshot of a layer's data, so that nothing of the instance takes part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import Refused, UnboundedLayer
from tacit.lipschitz.bounds import Bound, Bounded, Pullback
from tacit.lipschitz.integrity import ours, place
from tacit.lipschitz.rounding import EXACT, Rounding
from tacit.lipschitz.torch_modules import NEGLIGIBLE


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
class Notes:
    """What a walk is asked with, and what it finds: bounds by parameter, and a row for each layer.

    `clips` says whether cotangents are limited on their way, as they are in training.
    """

    names: dict[int, str]
    rounding: Rounding = EXACT
    clips: bool = True
    by_parameter: dict[str, float] = field(default_factory=dict)
    layers: list[LayerRow] = field(default_factory=list)


class Hookless(nn.Module):
    """A module that is called without any hook, not even one that PyTorch runs for all modules."""

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = self.forward(x)
        return found


class Step(Hookless):
    """Part of a program. `path` and `kind` say which module of the model it was made from."""

    def __init__(self, path: str, kind: type) -> None:
        super().__init__()
        self.path, self.kind = path, kind

    def walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        """The bound on what comes out, and the way back of a cotangent's bound."""
        with located(self.path, self.kind):
            return self._walk(x, notes)

    def _walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class LayerStep(Step):
    """One layer. `answers` are for `layer`, a snapshot; `code` is the forward of its class."""

    def __init__(
        self, path: str, kind: type, layer: nn.Module, answers: Bounded | None = None
    ) -> None:
        super().__init__(path, kind)
        self.layer = layer
        self.known_answers = answers
        self.run: Callable[[Tensor], Tensor] = partial(type(layer).forward, layer)

    @property
    def answers(self) -> Bounded:
        found: Any = self.layer if self.known_answers is None else self.known_answers
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def _walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        try:
            return self._ask(x, notes)
        except AttributeError as error:
            if not ours(type(self.layer)):
                raise
            raise Refused(f"a setting that its class needs is missing: {error}") from error

    def _ask(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        answers, kind = self.answers, self.kind.__name__
        if not notes.clips:
            _require_no_jump(answers)
        slack = 0.0 if getattr(answers, "exact", False) else notes.rounding.slack
        out = Bound(answers.output_norm(x) * (1 + slack), shape_after(self, x.shape))
        lipschitz = answers.lipschitz(x) * (1 + slack)

        def back(cotangent: float) -> float:
            gradients = {
                name: norm * (1 + slack)
                for name, norm in answers.gradient_norms(x, cotangent).items()
            }
            for local, norm in gradients.items():
                name = self._name_of(local, notes)
                notes.by_parameter[name] = notes.by_parameter.get(name, 0.0) + norm
            row = (self.path or "model", kind, x.norm, out.norm, lipschitz, cotangent, gradients)
            notes.layers.append(LayerRow(*row))
            # A layer may limit the cotangent that passes it (`ClipGradient`).
            limit = getattr(answers, "cotangent_limit", math.inf) if notes.clips else math.inf
            # 0 · ∞ is no bound at all, and a cotangent of 0 stays 0 through any layer.
            return _times(lipschitz, min(cotangent, limit))

        return out, back

    def _name_of(self, local: str, notes: Notes) -> str:
        holder, _, last = local.rpartition(".")
        parameter = self.layer.get_submodule(holder)._parameters.get(last)
        if parameter is None or id(parameter) not in notes.names:
            with located(self.path, self.kind):
                raise Refused(f"it answers for {local!r}, which is none of its parameters")
        return notes.names[id(parameter)]


class SequenceStep(Step):
    """Steps one after the other: forwards in order, backwards in reverse."""

    def __init__(self, path: str, kind: type, steps: Sequence[Step]) -> None:
        super().__init__(path, kind)
        self.steps = nn.ModuleList(steps)
        self._in_order = tuple(steps)

    def forward(self, x: Tensor) -> Tensor:
        for step in self._in_order:
            x = step.forward(x)
        return x

    def _walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        backs: list[Pullback] = []
        for step in self._in_order:
            x, back = step.walk(x, notes)
            backs.append(back)

        def pull(cotangent: float) -> float:
            for back in reversed(backs):
                cotangent = back(cotangent)
            return cotangent

        return x, pull


class ComposedStep(Step):
    """A module with `walk_bounds`, its class's forward on a snapshot with steps for children."""

    def __init__(self, path: str, kind: type, layer: Any) -> None:
        super().__init__(path, kind)
        self.layer = layer
        self.run: Callable[[Tensor], Tensor] = partial(type(layer).forward, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def _walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        layer: Any = self.layer

        def walk(name: str, x: Bound) -> tuple[Bound, Pullback]:
            step = layer.get_submodule(name)
            if not isinstance(step, Step):
                raise Refused(
                    f"walk_bounds names {name!r}, which is no module to send a bound into"
                )
            return step.walk(x, notes)

        out, back = layer.walk_bounds(x, walk)
        # What a module adds up is rounded too, forwards and backwards.
        slack = 0.0 if getattr(layer, "exact", False) else notes.rounding.slack
        rounded = Bound(out.norm * (1 + slack), out.shape)
        return rounded, lambda cotangent: back(cotangent) * (1 + slack)


class UnboundedStep(Step):
    """A child that has no bound, of a module that may never use it."""

    def __init__(self, path: str, kind: type, error: UnboundedLayer) -> None:
        super().__init__(path, kind)
        self.error = error

    def walk(self, x: Bound, notes: Notes) -> tuple[Bound, Pullback]:
        raise self.error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@contextmanager
def located(path: str, kind: type) -> Iterator[None]:
    """Say which layer a refusal is about."""
    try:
        yield
    except Refused as refused:
        where = place(path, kind)
        raise UnboundedLayer(f"{where} has no gradient bound: {refused}") from refused


def shape_after(step: LayerStep, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what a layer makes of one record, learnt by running two records of zeros.

    Two, so that a layer that loses track of the records is noticed. They are where its parameters
    are, or its buffers.
    """
    held = itertools.chain(step.parameters(), step.buffers())
    like = next((tensor for tensor in held if tensor.is_floating_point()), None)
    probe = torch.zeros(2, *shape) if like is None else like.new_zeros(2, *shape)
    modes = [(part, part.training) for part in step.modules()]
    for part, _ in modes:
        part.training = False
    try:
        with torch.no_grad():
            output = step.forward(probe)
    finally:
        for part, training in modes:
            part.training = training
    if not isinstance(output, torch.Tensor) or output.dim() == 0 or len(output) != 2:
        raise UnboundedLayer(
            f"{step.kind.__name__} does not keep one row a record; a bound is for one record"
        )
    return tuple(output.shape[1:])


def _require_no_jump(answers: Bounded) -> None:
    """A derivative may be bounded on both sides of a jump; the function's moves are not."""
    jump = getattr(answers, "jump", 0.0)
    if jump > NEGLIGIBLE:
        raise Refused(
            f"it jumps by {jump:.3g}, so it has no Lipschitz constant in its input; use "
            "nn.Softplus with a larger threshold, such as 20 for a beta of 1"
        )


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b
