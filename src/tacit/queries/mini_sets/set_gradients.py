"""g(w; S): what one mini-set of records proposes, before it is clipped.

Clipping bounds whatever g returns, so g may be any function of the weights and of the records of
*one* mini-set [Nguyen 2023, Eq. 6]. It must not see another set, nor remember an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tacit.engines.torch_internals import plain_program, swapped
from tacit.losses.record_losses import losses_of
from tacit.pytrees import Tree, call_model, num_rows, take_rows
from tacit.queries.bounded_gradient import Loss
from tacit.queries.mini_sets.too_small import too_small_is_nothing

Parameters = dict[str, nn.Parameter]


class SetGradient(Protocol):
    """Weights and the records of one mini-set to a vector, as one tensor per parameter.

    `inputs` and `targets` are tensors or pytrees of them, as in `Records`.
    """

    def __call__(
        self, model: nn.Module, loss: Loss, parameters: Parameters, inputs: Tree, targets: Tree
    ) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class MeanGradient:
    """(1/|S|)·Σ_{ξ ∈ S} ∇f(w; ξ), in one forward and one backward pass of the whole set.

    BatchNorm sees the set, and nothing but the set.
    """

    def __call__(
        self, model: nn.Module, loss: Loss, parameters: Parameters, inputs: Tree, targets: Tree
    ) -> dict[str, Tensor]:
        grads = _of_the_mean(model, loss, list(parameters.values()), inputs, targets)
        return {
            name: torch.zeros_like(p, requires_grad=False) if g is None else g
            for (name, p), g in zip(parameters.items(), grads, strict=True)
        }


@dataclass(frozen=True)
class LocalRun:
    """w − w', where w' is reached from w by a run of an optimizer over the records of the set.

    `optimizer` makes a new one of a list of tensors, such as
    `partial(torch.optim.SGD, lr=0.1, momentum=0.9)` or `partial(torch.optim.Adam, lr=1e-3)`: its
    memory begins and ends with the set, as another set's must not be in it. The set's records are
    scanned in their order, `at_once` of them a step, `epochs` times; a rest that is too small for
    BatchNorm is passed over. The result is a
    pseudo-gradient: SGD on it with learning rate 1 moves to the (noisy) mean of the sets' w'.
    """

    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    epochs: int = 1
    at_once: int = 1

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.at_once < 1:
            raise ValueError(
                f"epochs is {self.epochs} and at_once is {self.at_once}; give at least 1"
            )

    def __call__(
        self, model: nn.Module, loss: Loss, parameters: Parameters, inputs: Tree, targets: Tree
    ) -> dict[str, Tensor]:
        moving = {n: p.detach().clone().requires_grad_() for n, p in parameters.items()}
        tensors = list(moving.values())
        stepper = self.optimizer(tensors)
        # What a pass writes to a buffer from weights alone is private here: the weights have moved.
        buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        for start in (*range(0, num_rows(inputs), self.at_once),) * self.epochs:
            x, y = take_rows((inputs, targets), slice(start, start + self.at_once))
            with too_small_is_nothing(), swapped(model, moving | buffers):
                grads = _of_the_mean(model, loss, tensors, x, y)
                for tensor, grad in zip(tensors, grads, strict=True):
                    tensor.grad = grad
                stepper.step()
        return {n: p.detach() - moving[n].detach() for n, p in parameters.items()}


def _of_the_mean(
    model: nn.Module, loss: Loss, tensors: list[Tensor], inputs: Tree, targets: Tree
) -> list[Tensor | None]:
    """The gradient of the records' mean loss at these tensors; None at those that it has not."""
    with plain_program(functions=False), torch.enable_grad():
        value = losses_of(loss, call_model(model, inputs), targets).mean()
        if not value.requires_grad:
            return [None] * len(tensors)
        found = torch.autograd.grad(value, tensors, allow_unused=True)
    return [None if grad is None else grad.to_dense() for grad in found]
