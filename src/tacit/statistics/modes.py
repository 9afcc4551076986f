"""Training and evaluation modes of every module, put back as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tacit.statistics.tracking import remembers


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards each module is in the mode that it had.

    `model.train()` would unfreeze a BatchNorm that somebody keeps in evaluation mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        for module, training in modes:
            module.training = training


def train_unfrozen(model: nn.Module) -> None:
    """The model in training mode, less the norms that are frozen in a model that trains."""
    frozen = [m for m in model.modules() if model.training and remembers(m) and not m.training]
    model.train()
    for module in frozen:
        module.eval()
