"""Gradient ascent against a loss's Lipschitz constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

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
