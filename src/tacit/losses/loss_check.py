"""Attacks on the contract of a loss, on which privacy rests.

The contract of a loss ℓ(h, y), h one record's outputs and y its targets:

1. It gives one number per record (`per_record`), or the mean or the sum of those numbers.
2. A record's number depends on its own outputs and targets alone: on no other record, no class
   count, no statistic of the batch, and on nothing that an earlier call left behind.
3. Its values and gradients are finite for finite outputs.
4. It declares its task (`tacit.losses.Task`), so that reports show metrics that mean something.
5. For `Clipless`, it declares a Lipschitz constant: `lipschitz_for(num_outputs)`, or an attribute
   `lipschitz`, is at least ‖∇_h ℓ(h, y)‖₂ for *every* h and y. The noise is scaled by it, so a
   constant that is too small is a false ε. Clipping needs none.

`check_loss` attacks points 1, 2, 3 and 5. No test can prove them: derive the constant. A mean or a
sum of your own is evaluated on one record at a time (`losses_of`), so that point 2 cannot break a
run's ε; one number per record is checked together with the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from tacit.losses.record_loss import (
    WithConstant,
    fresh,
    loss_constant,
    loss_constant_or_none,
    name_of,
    needs_pre_activations,
)
from tacit.losses.registry import Task, task_of

_RECORDS, _POSITIONS = 7, 3
_SIZES = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e4)


def attack_constant(
    loss: Callable[[Tensor, Tensor], Tensor],
    num_outputs: int,
    *,
    targets: Tensor | None = None,
    steps: int = 100,
) -> float:
    """The largest gradient norm found as a share of the constant; `ValueError` if it is above 1.

    Near 1 the constant is tight; far below 1 noise is wasted, or the attack was weak.
    """
    constant = loss_constant(loss, num_outputs)
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
    are those to try, by default every class (0 and 1 for one output), or sets of labels.
    """
    if targets is None:
        task = task_of(loss, torch.zeros(1, num_outputs), torch.zeros(1, dtype=torch.long))
        targets = _targets(task if task is Task.MULTI_LABEL else None, num_outputs)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(_SIZES, dtype=torch.float64).repeat_interleave(starts)[:, None]
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


@dataclass(frozen=True)
class LossCheck:
    """What `check_loss` found: the task, the constant, and the share of it that was reached.

    Near 1 the constant is tight; far below 1 noise is wasted, or the attack was weak.
    """

    task: Task | None
    constant: float | None
    share: float | None


def check_loss(
    loss: Any, num_outputs: int, *, targets: Tensor | None = None, steps: int = 60
) -> LossCheck:
    """Attack the contract of a loss for a model of `num_outputs`; ValueError where it breaks.

    Records are evaluated alone and in company, at outputs of every size, in float32 and float64;
    a declared Lipschitz constant is attacked by gradient ascent over the outputs. `targets` are
    those to try, by default classes, or normal numbers for a regression. That nothing is found
    proves nothing.

        tacit.losses.check_loss(tacit.losses.Focal(gamma=2.0), num_outputs=10)
    """
    if needs_pre_activations(loss):
        raise ValueError(
            f"{name_of(loss)} reads the model's pre-activations, so it is not a function of "
            "outputs and targets; check the parts that are"
        )
    loss = fresh(loss)
    example = torch.zeros(1, dtype=torch.long) if targets is None else targets[:1]
    task = task_of(loss, torch.zeros(1, num_outputs), example)
    shape = (_POSITIONS, num_outputs) if task is Task.TOKENS else (num_outputs,)
    targets = _targets(task, num_outputs) if targets is None else targets
    generator = torch.Generator().manual_seed(0)
    for size in (1.0, 0.0, 1e-6, 1e4):
        for dtype in (torch.float64, torch.float32):
            h = size * torch.randn(_RECORDS, *shape, generator=generator, dtype=torch.float64)
            rows = torch.randint(len(targets), (_RECORDS,), generator=generator)
            rows[0] = 0  # alone in its class, mostly
            y = targets[rows]
            _check_batch(loss, h.to(dtype), y.to(dtype) if y.is_floating_point() else y)
    constant, share = loss_constant_or_none(loss, math.prod(shape)), None
    if constant is not None:
        flat = WithConstant(lambda h, y: loss(h.reshape(len(h), *shape), y), constant)
        share = attack_constant(flat, math.prod(shape), targets=targets, steps=steps)
    return LossCheck(task, constant, share)


def _check_batch(loss: Any, h: Tensor, y: Tensor) -> None:
    single, single_gradients = _one_by_one(loss, h, y)
    if not (single.isfinite().all() and single_gradients.isfinite().all()):
        raise ValueError(
            f"{name_of(loss)} is not finite, or its gradient is not, at outputs of size "
            f"{float(h.abs().max()):g} in {h.dtype}; bound or clamp what overflows"
        )
    together, gradients = _losses_and_gradients(loss, h, y)
    expected, expected_gradients = single, single_gradients
    if together.dim() == 0:  # the sum or the mean, whichever is nearer
        reductions = (single.sum(), single_gradients), (single.mean(), single_gradients / len(h))
        expected, expected_gradients = min(reductions, key=lambda r: float((r[0] - together).abs()))
    digits = torch.finfo(h.dtype).eps
    if not torch.allclose(together, expected, rtol=1e3 * digits, atol=digits):
        raise ValueError(
            f"{name_of(loss)} gives {together.tolist()} for records together and {single.tolist()} "
            "one by one: one number depends on other records. Use no statistic of the batch; give "
            "one number per record, or their mean or sum"
        )
    most = max(float(single_gradients.abs().max()), float(single.abs().max()) * digits) + 1e-30
    if not (gradients - expected_gradients).abs().max() <= 1e3 * digits * most:
        raise ValueError(
            f"{name_of(loss)} has other gradients for records together than one by one: a record's "
            "gradient depends on other records. Use no statistic of the batch, detached or not"
        )
    if not torch.equal(_one_by_one(loss, h, y)[0], single):
        raise ValueError(
            f"{name_of(loss)} gives other numbers when it is called again with the same records; "
            "it must keep no state between calls and draw nothing at random"
        )


def _one_by_one(loss: Any, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """ℓ(h_i, y_i) and its gradient, each record in a call of its own."""
    pairs = [_losses_and_gradients(loss, h[i : i + 1], y[i : i + 1]) for i in range(len(h))]
    return torch.stack([v.reshape(()) for v, _ in pairs]), torch.cat([g for _, g in pairs])


def _losses_and_gradients(loss: Any, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = h.detach().clone().requires_grad_()
    value = getattr(loss, "per_record", loss)(h, y)
    if value.shape not in (torch.Size([]), torch.Size([len(h)])):
        raise ValueError(
            f"{name_of(loss)} gives shape {tuple(value.shape)} for {len(h)} records; give one "
            "number per record, or their mean"
        )
    if not value.requires_grad:  # constant here, such as a hinge that is met
        return value.detach(), torch.zeros_like(h)
    (gradient,) = torch.autograd.grad(value.sum(), h, materialize_grads=True)
    return value.detach(), gradient


def _targets(task: Task | None, num_outputs: int) -> Tensor:
    if task is Task.REGRESSION:
        generator = torch.Generator().manual_seed(1)
        spread = torch.tensor([1e-2, 1.0, 1e3], dtype=torch.float64).repeat_interleave(8)
        normal = torch.randn(24, num_outputs, generator=generator, dtype=torch.float64)
        return spread[:, None] * normal
    if task is Task.MULTI_LABEL:  # none, one, half and all of the labels
        one = torch.eye(num_outputs, dtype=torch.long)
        half = torch.arange(num_outputs).remainder(2)[None]
        return torch.cat([one, 1 - one, half, 1 - half, 0 * half, 0 * half + 1])
    classes = torch.arange(max(num_outputs, 2))
    if task is not Task.TOKENS:
        return classes
    return torch.stack([classes.roll(i) for i in range(_POSITIONS)], dim=1)
