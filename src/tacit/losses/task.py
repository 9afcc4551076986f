"""What a loss trains for, which decides the metrics that a report may show."""

from __future__ import annotations

import enum

import torch.nn.functional as F
from torch import Tensor, nn


class Task(enum.StrEnum):
    """What the outputs and targets of one record are.

    CLASSIFICATION: one output per class and a class as target, with classes along dimension 1; or
    one output, whose sign decides between two classes.
    BINARY: one output, whose sign decides; targets are 0 and 1, or −1 and +1.
    REGRESSION: one real-valued target per output.
    TOKENS: outputs of shape (records, positions, classes) and one class per position.
    """

    CLASSIFICATION = "classification"
    BINARY = "binary"
    REGRESSION = "regression"
    TOKENS = "tokens"


def task_of(loss: object, outputs: Tensor, targets: Tensor) -> Task | None:
    """The task that the loss declares for such outputs and targets; None where nobody says.

    Asked is `loss.task_for(outputs, targets)`, then `loss.task`; PyTorch's own losses are known
    here. A loss without a declaration is not guessed at: a single output may be a regression, and
    reading it as two classes would give a false accuracy.
    """
    ask = getattr(loss, "task_for", None)
    declared = getattr(loss, "task", None) if ask is None else ask(outputs, targets)
    if declared is not None:
        return Task(declared)
    if isinstance(loss, nn.Module):
        return _TORCH_MODULES.get(type(loss))
    return _TORCH_FUNCTIONS.get(getattr(loss, "__name__", "")) if _is_torchs(loss) else None


_TORCH_MODULES: dict[type[nn.Module], Task] = {
    nn.CrossEntropyLoss: Task.CLASSIFICATION,
    nn.NLLLoss: Task.CLASSIFICATION,
    nn.MultiMarginLoss: Task.CLASSIFICATION,
    nn.BCEWithLogitsLoss: Task.BINARY,
    nn.SoftMarginLoss: Task.BINARY,
    nn.MSELoss: Task.REGRESSION,
    nn.L1Loss: Task.REGRESSION,
    nn.SmoothL1Loss: Task.REGRESSION,
    nn.HuberLoss: Task.REGRESSION,
}
_TORCH_FUNCTIONS: dict[str, Task] = {
    "cross_entropy": Task.CLASSIFICATION,
    "nll_loss": Task.CLASSIFICATION,
    "multi_margin_loss": Task.CLASSIFICATION,
    "binary_cross_entropy_with_logits": Task.BINARY,
    "soft_margin_loss": Task.BINARY,
    "mse_loss": Task.REGRESSION,
    "l1_loss": Task.REGRESSION,
    "smooth_l1_loss": Task.REGRESSION,
    "huber_loss": Task.REGRESSION,
}


def _is_torchs(loss: object) -> bool:
    return loss is getattr(F, getattr(loss, "__name__", ""), None)
