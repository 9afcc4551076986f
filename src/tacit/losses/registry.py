"""Losses by name, and a check that a loss keeps the contract on which privacy rests.

The contract of a loss ℓ(h, y), h one record's outputs and y its targets:

1. It gives one number per record (`per_record`), or the mean or the sum of those numbers.
2. A record's number depends on its own outputs and targets alone: on no other record, no class
   count, no statistic of the batch, and on nothing that an earlier call left behind.
3. Its values and gradients are finite for finite outputs.
4. It says its task (`tacit.losses.Task`), so that reports show metrics that mean something.
5. For `Clipless`, it says a Lipschitz constant: `lipschitz_for(num_outputs)`, or an attribute
   `lipschitz`, is at least ‖∇_h ℓ(h, y)‖₂ for *every* h and y. The noise is scaled by it, so a
   constant that is too small is a false ε. Clipping needs none.

`check_loss` attacks points 1, 2, 3 and 5. No test can prove them: derive the constant. A mean or a
sum of your own is evaluated on one record at a time (`losses_of`), so that point 2 cannot break a
run's ε; one number per record is checked together with the model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tacit.losses.loss_constant import attack_constant
from tacit.losses.pre_activations import needs_pre_activations
from tacit.losses.record_loss import Task, fresh, task_of

Kind = TypeVar("Kind", bound=Callable[..., Any])

_REGISTERED: dict[str, Callable[..., Any]] = {}
_RECORDS, _POSITIONS = 7, 3


def register_loss(
    name: str, *, task: Task | str | None = None, lipschitz: float | None = None
) -> Callable[[Kind], Kind]:
    """Make a loss known by `name` to the command line (`--loss name`) and to saved runs.

    Decorates a class whose instances are losses, such as a subclass of `RecordLoss`, or a function
    of (outputs, targets). `task` and `lipschitz` are for those that do not say them themselves.
    The numbers that a class takes are set by the command line's options of the same name
    (`--temperature`, `--beta`, `--gamma`, `--threshold-epoch`); others keep their defaults.

        @tacit.register_loss("squared-hinge", task="classification")
        def squared_hinge(outputs, targets): ...

    The contract is at the top of this module; `tacit.losses.check_loss` attacks it.
    """
    if not name or name != name.strip().lower() or any(c.isspace() for c in name):
        raise ValueError(f"name is {name!r}; give lower-case letters without blanks: my-loss")

    def register(loss: Kind) -> Kind:
        known = _REGISTERED.get(name)
        if known is not None and _origin(known) != _origin(loss):
            raise ValueError(
                f"the name {name!r} belongs to {'.'.join(_origin(known))} already; give another"
            )
        for attribute, value in (("task", task and Task(task)), ("lipschitz", lipschitz)):
            if value is not None:
                setattr(loss, attribute, value)
        if not _says_task(loss):
            raise TypeError(
                f"the loss {name!r} does not say its task; give register_loss({name!r}, "
                "task='classification'), or 'binary', 'regression' or 'tokens'"
            )
        _REGISTERED[name] = loss
        return loss

    return register


def registered_losses() -> tuple[str, ...]:
    """The names that `--loss` takes, in alphabetical order."""
    return tuple(sorted(_REGISTERED))


def loss_named(name: str, **numbers: float) -> Any:
    """The loss of this name, made with these numbers: `loss_named("focal", gamma=5)`."""
    loss = _known(name)
    return loss(**numbers) if inspect.isclass(loss) else loss


def numbers_of(name: str) -> dict[str, bool]:
    """The numbers that the loss of this name takes, and whether each has a default."""
    loss = _known(name)
    if not inspect.isclass(loss):
        return {}
    parameters = inspect.signature(loss).parameters.values()
    return {p.name: p.default is not p.empty for p in parameters}


def _known(name: str) -> Callable[..., Any]:
    if name not in _REGISTERED:
        raise ValueError(
            f"no loss is named {name!r}; known are {', '.join(registered_losses())}. A loss of "
            "your own is registered with @tacit.register_loss, and its module imported before"
        )
    return _REGISTERED[name]


def _says_task(loss: Any) -> bool:
    """By `task`, or by a `task_for` of its own, which sees the targets and may serve several."""
    own = getattr(loss, "task_for", None)
    return getattr(loss, "task", None) is not None or (
        own is not None and own.__qualname__ != "RecordLoss.task_for"
    )


def _origin(loss: Any) -> tuple[str, str]:
    return loss.__module__, loss.__qualname__


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
    from tacit.losses.loss_constant import loss_constant_or_none

    if needs_pre_activations(loss):
        raise ValueError(
            f"{_name(loss)} reads the model's pre-activations, so it is not a function of outputs "
            "and targets; check the parts that are"
        )
    loss = fresh(loss)
    task = _declared_task(loss, num_outputs, targets)
    shape = (_POSITIONS, num_outputs) if task is Task.TOKENS else (num_outputs,)
    tried = _targets(task, num_outputs) if targets is None else targets
    generator = torch.Generator().manual_seed(0)
    for size in (1.0, 0.0, 1e-6, 1e4):
        for dtype in (torch.float64, torch.float32):
            h = size * torch.randn(_RECORDS, *shape, generator=generator, dtype=torch.float64)
            rows = torch.randint(len(tried), (_RECORDS,), generator=generator)
            rows[0] = 0  # alone in its class, mostly
            y = tried[rows]
            _check_batch(loss, h.to(dtype), y.to(dtype) if y.is_floating_point() else y)
    constant, share = loss_constant_or_none(loss, math.prod(shape)), None
    if constant is not None:
        flat = _Reshaped(loss, shape, constant)
        share = attack_constant(flat, math.prod(shape), targets=tried, steps=steps)
    return LossCheck(task, constant, share)


def _check_batch(loss: Any, h: Tensor, y: Tensor) -> None:
    alone, alone_gradients = _losses_alone(loss, h, y)
    if not (alone.isfinite().all() and alone_gradients.isfinite().all()):
        raise ValueError(
            f"{_name(loss)} is not finite, or its gradient is not, at outputs of size "
            f"{float(h.abs().max()):g} in {h.dtype}; bound or clamp what overflows"
        )
    together, gradients = _losses_together(loss, h, y)
    digits = torch.finfo(h.dtype).eps
    scale = float(alone.abs().max()) + 1e-30
    if not torch.allclose(together, _reduced(together, alone), rtol=1e3 * digits, atol=digits):
        raise ValueError(
            f"{_name(loss)} gives {together.tolist()} for records together and {alone.tolist()} "
            "one by one: one number depends on other records. Use no statistic of the batch; give "
            "one number per record, or their mean or sum"
        )
    slope = float(alone_gradients.abs().max()) + 1e-30
    wanted = _reduced_gradients(together, alone, alone_gradients)
    if not (gradients - wanted).abs().max() <= 1e3 * digits * max(slope, scale * digits):
        raise ValueError(
            f"{_name(loss)} has other gradients for records together than one by one: a record's "
            "gradient depends on other records. Use no statistic of the batch, detached or not"
        )
    again, _ = _losses_alone(loss, h, y)
    if not torch.equal(again, alone):
        raise ValueError(
            f"{_name(loss)} gives other numbers when it is called again with the same records; it "
            "may keep nothing from one call to the next, and draw nothing at random"
        )


def _losses_alone(loss: Any, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """ℓ(h_i, y_i) and its gradient, each record in a call of its own."""
    values, gradients = [], []
    for i in range(len(h)):
        value, gradient = _losses_together(loss, h[i : i + 1], y[i : i + 1])
        if value.numel() != 1:
            raise ValueError(f"{_name(loss)} gives {tuple(value.shape)} for one record; give one")
        values.append(value.reshape(()))
        gradients.append(gradient[0])
    return torch.stack(values), torch.stack(gradients)


def _losses_together(loss: Any, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = h.detach().clone().requires_grad_()
    value = getattr(loss, "per_record", loss)(h, y)
    if value.shape not in (torch.Size([]), torch.Size([len(h)])):
        raise ValueError(
            f"{_name(loss)} gives shape {tuple(value.shape)} for {len(h)} records; give one number "
            "per record, or their mean"
        )
    if not value.requires_grad:  # constant here, such as a hinge that is met
        return value.detach(), torch.zeros_like(h)
    (gradient,) = torch.autograd.grad(value.sum(), h, allow_unused=True)
    return value.detach(), torch.zeros_like(h) if gradient is None else gradient


def _reduced(together: Tensor, alone: Tensor) -> Tensor:
    """What `together` must be: each number, or their mean or sum, whichever is nearer."""
    if together.dim() == 1:
        return alone
    return min((alone.mean(), alone.sum()), key=lambda v: float((v - together).abs()))


def _reduced_gradients(together: Tensor, alone: Tensor, gradients: Tensor) -> Tensor:
    summed = together.dim() == 1 or bool(_reduced(together, alone) == alone.sum())
    return gradients if summed else gradients / len(alone)


def _declared_task(loss: Any, num_outputs: int, targets: Tensor | None) -> Task | None:
    example = torch.zeros(1, dtype=torch.long) if targets is None else targets[:1]
    return task_of(loss, torch.zeros(1, num_outputs), example)


def _targets(task: Task | None, num_outputs: int) -> Tensor:
    if task is Task.REGRESSION:
        generator = torch.Generator().manual_seed(1)
        spread = torch.tensor([1e-2, 1.0, 1e3], dtype=torch.float64).repeat_interleave(8)
        normal = torch.randn(24, num_outputs, generator=generator, dtype=torch.float64)
        return spread[:, None] * normal
    classes = torch.arange(max(num_outputs, 2))
    if task is not Task.TOKENS:
        return classes
    return torch.stack([classes.roll(i) for i in range(_POSITIONS)], dim=1)


@dataclass(frozen=True)
class _Reshaped:
    """The loss for `attack_constant`, which moves a flat vector of outputs."""

    loss: Any
    shape: Sequence[int]
    constant: float

    def lipschitz_for(self, num_outputs: int) -> float:
        return self.constant

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = self.loss(outputs.reshape(len(outputs), *self.shape), targets)
        return value


def _name(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))
