"""What a loss trains for, and losses by name.

A task decides which metrics a report may show. `register_loss` makes a loss known to the command
line and to saved runs. What a loss must keep is in `tacit.losses.loss_check`, which attacks it.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from tacit.errors import in_words

Kind = TypeVar("Kind", bound=Callable[..., Any])


class Task(enum.StrEnum):
    """What the outputs and targets of one record are.

    CLASSIFICATION: one output per class and a class as target, with classes along dimension 1; or
    one output, whose sign decides between two classes.
    BINARY: one output, whose sign decides; targets are 0 and 1, or −1 and +1.
    MULTI_LABEL: one output per label, whose sign decides; targets are 0 and 1, of the same shape.
    REGRESSION: one real-valued target per output.
    TOKENS: outputs of shape (records, positions, classes) and one class per position.
    """

    CLASSIFICATION = "classification"
    BINARY = "binary"
    MULTI_LABEL = "multi-label"
    REGRESSION = "regression"
    TOKENS = "tokens"


def task_of(loss: object, outputs: Tensor, targets: Tensor) -> Task | None:
    """The task that the loss declares for such outputs and targets; None if it declares none.

    It is `loss.task_for(outputs, targets)`, else `loss.task`; PyTorch's own losses are known here.
    There is no guess for other losses: a single output may be a regression, and reading it as two
    classes would give a false accuracy.
    """
    task_for = getattr(loss, "task_for", None)
    task = getattr(loss, "task", None) if task_for is None else task_for(outputs, targets)
    if task is not None:
        return Task(task)
    _, task_of_pytorch = torch_loss(loss) or (None, None)
    several = targets.dim() > 1 and targets.shape[1:].numel() > 1
    if task_of_pytorch is Task.BINARY and several:
        return Task.MULTI_LABEL if targets.shape == outputs.shape else None
    return task_of_pytorch


# PyTorch's losses: module, function of torch.nn.functional, task.
TORCH_LOSSES: dict[type[nn.Module], tuple[str, Task | None]] = {
    nn.CrossEntropyLoss: ("cross_entropy", Task.CLASSIFICATION),
    nn.NLLLoss: ("nll_loss", Task.CLASSIFICATION),
    nn.MultiMarginLoss: ("multi_margin_loss", Task.CLASSIFICATION),
    nn.BCEWithLogitsLoss: ("binary_cross_entropy_with_logits", Task.BINARY),
    nn.SoftMarginLoss: ("soft_margin_loss", Task.BINARY),
    nn.MSELoss: ("mse_loss", Task.REGRESSION),
    nn.L1Loss: ("l1_loss", Task.REGRESSION),
    nn.SmoothL1Loss: ("smooth_l1_loss", Task.REGRESSION),
    nn.HuberLoss: ("huber_loss", Task.REGRESSION),
    nn.BCELoss: ("binary_cross_entropy", None),
    nn.KLDivLoss: ("kl_div", None),
    nn.PoissonNLLLoss: ("poisson_nll_loss", None),
    nn.HingeEmbeddingLoss: ("hinge_embedding_loss", None),
    nn.MultiLabelMarginLoss: ("multilabel_margin_loss", None),
    nn.MultiLabelSoftMarginLoss: ("multilabel_soft_margin_loss", None),
}
# By identity: a user's function may have the same name.
_TORCH_FUNCTIONS = {id(getattr(F, name)): (name, task) for name, task in TORCH_LOSSES.values()}


def torch_loss(loss: object) -> tuple[str, Task | None] | None:
    """The function's name and the task, if the loss is one of PyTorch's modules or functions."""
    return TORCH_LOSSES.get(type(loss)) or _TORCH_FUNCTIONS.get(id(loss))  # type: ignore[arg-type]


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
        owner = _REGISTERED.get(name, loss)
        if _origin(owner) != _origin(loss):
            raise ValueError(f"the name {name!r} belongs to {_origin(owner)} already; give another")
        for attribute, value in (("task", task and Task(task)), ("lipschitz", lipschitz)):
            if value is not None:
                setattr(loss, attribute, value)
        if not _says_task(loss):
            raise TypeError(
                f"the loss {name!r} does not say its task; give register_loss({name!r}, "
                "task='classification'), or 'binary', 'multi-label', 'regression' or 'tokens'"
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
            "your own is registered with @tacit.register_loss, "
            + in_words("and its module imported before", "in a file: tacit --plugin FILE train")
        )
    return _REGISTERED[name]


def _says_task(loss: Any) -> bool:
    """By `task`, or by a `task_for` of its own, which sees the targets and may serve several."""
    task_for = getattr(loss, "task_for", None)
    return getattr(loss, "task", None) is not None or (
        task_for is not None and task_for.__qualname__ != "RecordLoss.task_for"
    )


def _origin(loss: Any) -> str:
    return f"{loss.__module__}.{loss.__qualname__}"
