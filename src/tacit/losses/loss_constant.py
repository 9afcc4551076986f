"""Lipschitz constants of losses, and gradient ascent against them.

The Lipschitz constant of a loss in one record's outputs.

Gradient ascent against a loss's Lipschitz constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from tacit.errors import UnboundedLayer


def loss_constant(loss: object, num_outputs: int) -> float:
    """The largest norm of one record's loss gradient in its outputs; UnboundedLayer if unknown."""
    found = loss_constant_or_none(loss, num_outputs)
    if found is not None:
        return found
    name = getattr(loss, "__name__", type(loss).__name__)
    raise UnboundedLayer(
        f"the loss {name!r} has no known Lipschitz constant; use one of tacit.losses, such as "
        "CrossEntropy(), say what it is with tacit.losses.WithConstant(loss, lipschitz), or clip "
        "the loss gradient with Clipless(gradient_clip=…)"
    )


def loss_constant_or_none(loss: object, num_outputs: int) -> float | None:
    """The constant, where the loss is known to have one: Tacit's answer `lipschitz_for`.

    PyTorch's own have none: a record chooses its targets, and cross-entropy of a soft label of
    10⁶, or of many positions summed, has no gradient of norm √2.
    """
    ask: Callable[[int], float] | None = getattr(loss, "lipschitz_for", None)
    if ask is not None:
        return float(ask(num_outputs))
    constant = getattr(loss, "lipschitz", None)
    return None if constant is None else float(constant)


@dataclass(frozen=True)
class ClippedLoss:
    """A loss whose gradient in the outputs is limited to `max_norm`, record by record."""

    loss: object
    max_norm: float

    def lipschitz_for(self, num_outputs: int) -> float:
        own = loss_constant_or_none(self.loss, num_outputs)
        return self.max_norm if own is None else min(self.max_norm, own)


SCALES = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e4)


class HasConstant(Protocol):
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor: ...

    def lipschitz_for(self, num_outputs: int) -> float: ...


def attack_constant(
    loss: HasConstant, num_outputs: int, *, targets: Tensor | None = None, steps: int = 100
) -> float:
    """The largest gradient norm found as a share of the constant; `ValueError` if it is above 1.

    Near 1 the constant is tight; far below 1 noise is wasted, or the attack was weak.
    """
    constant = loss.lipschitz_for(num_outputs)
    largest = largest_gradient(loss, num_outputs, targets=targets, steps=steps)
    # What is left above 1 is rounding: everything is float64.
    if not largest <= constant * (1 + 1e-9):
        raise ValueError(
            f"the loss has a gradient of norm {largest:.6g} in one record's {num_outputs} outputs, "
            f"and its constant is {constant:.6g}; give a constant of at least that"
        )
    return largest / constant


def largest_gradient(
    loss: Callable[[Tensor, Tensor], Tensor],
    num_outputs: int,
    *,
    targets: Tensor | None = None,
    starts: int = 32,
    steps: int = 100,
) -> float:
    """max ‖∇_h ℓ(h, y)‖ that gradient ascent over the outputs h reaches, from below.

    From `starts` random outputs of each size between 10⁻³ and 10⁴, one record at a time. `targets`
    are those to try, by default every class (0 and 1 for one output).
    """
    if targets is None:
        targets = torch.arange(max(num_outputs, 2))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(SCALES, dtype=torch.float64).repeat_interleave(starts)[:, None]
    h = sizes * torch.randn(len(sizes), num_outputs, generator=generator, dtype=torch.float64)
    y = targets[torch.randint(len(targets), (len(sizes),), generator=generator)]

    def of_one(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.unsqueeze(0), target.unsqueeze(0)).sum()

    def steepness(output: Tensor, target: Tensor) -> Tensor:
        return torch.linalg.vector_norm(grad(of_one)(output, target))

    climb = vmap(grad_and_value(steepness))
    largest = 0.0
    for step in range(steps):
        uphill, norms = climb(h, y)
        if norms.isnan().any():
            return float("nan")
        largest = max(largest, float(norms.max()))
        length = torch.linalg.vector_norm(uphill, dim=1, keepdim=True)
        # Piecewise linear losses have no way up: their steps are left where they are.
        ahead = torch.where(length > 0, uphill / length, 0.0).nan_to_num(0.0)
        h = h + ahead * sizes * (1 - step / steps)
    return largest
