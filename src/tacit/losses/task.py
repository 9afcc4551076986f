"""What a loss trains for. It decides which metrics a report may show."""

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
    """The task that the loss declares for such outputs and targets; None if it declares none.

    It is `loss.task_for(outputs, targets)`, else `loss.task`; PyTorch's own losses are known here.
    There is no guess for other losses: a single output may be a regression, and reading it as two
    classes would give a false accuracy.
    """
    ask = getattr(loss, "task_for", None)
    declared = getattr(loss, "task", None) if ask is None else ask(outputs, targets)
    if declared is not None:
        return Task(declared)
    if isinstance(loss, nn.Module):
        return TORCH_LOSSES.get(type(loss), ("", None))[1]
    return _TASKS_OF_FUNCTIONS.get(id(loss))


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
_TASKS_OF_FUNCTIONS = {id(getattr(F, name)): task for name, task in TORCH_LOSSES.values()}
