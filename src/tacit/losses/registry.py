"""Losses by name: `register_loss` makes one known to the command line and to saved runs.

What a loss must keep is in `tacit.losses.loss_check`, which attacks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from tacit.losses.task import Task

Kind = TypeVar("Kind", bound=Callable[..., Any])

_REGISTERED: dict[str, Callable[..., Any]] = {}


def register_loss(
    name: str, *, task: Task | str | None = None, lipschitz: float | None = None
) -> Callable[[Kind], Kind]:
    """Make a loss known by `name` to the command line (`--loss name`) and to saved runs.

    Decorates a class whose instances are losses, such as a subclass of `RecordLoss`, or a function
    of (outputs, targets). `task` and `lipschitz` are for losses that do not declare them. The
    command line's options set the numbers of the same name that a class takes (`--temperature`,
    `--beta`, `--gamma`, `--threshold-epoch`); others keep their defaults.

        @tacit.register_loss("squared-hinge", task="classification")
        def squared_hinge(outputs, targets): ...

    `tacit.losses.check_loss` attacks the contract that every loss must keep.
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
