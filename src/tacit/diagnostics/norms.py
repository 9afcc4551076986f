"""Norms of weights, of pre-activations and of logits, by epoch.  [Losing Less, Figs. 1 and 5]"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tacit.data.records import Records
from tacit.diagnostics.diagnostic import Diagnostic
from tacit.losses.pre_activations import layers_of
from tacit.pytrees import call_model, logits_of
from tacit.queries.bounded_gradient import trainable

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer

LOGITS = "logits"


def weight_norms(model: nn.Module) -> dict[str, float]:
    """‖W‖ of each trainable parameter. The weights were released: this costs nothing."""
    return {n: _norms(p.detach().unsqueeze(0)).item() for n, p in trainable(model).items()}


@torch.no_grad()
def activation_norms(
    model: nn.Module, records: Records, *, batch_size: int = 256
) -> dict[str, float]:
    """Mean over records of ‖h^m‖ for each convolution and linear layer, then of the outputs.

    **Not private: reads pre-activations.** A layer that is called again has another row, "fc (2)".
    Where the last layer gives the outputs, both are there.
    """
    layers = {module: name for name, module in layers_of(model).items()}
    totals: dict[str, float] = {}
    calls: dict[str, int] = {}

    def count(name: str, h: Tensor) -> None:
        totals[name] = totals.get(name, 0.0) + float(_norms(h).sum())

    def seen(layer: nn.Module, args: Any, h: Any) -> None:
        name = layers[layer] or type(layer).__name__
        calls[name] = calls.get(name, 0) + 1
        count(name if calls[name] == 1 else f"{name} ({calls[name]})", h)

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            stack.callback(layer.register_forward_hook(seen).remove)
        for start in range(0, len(records), batch_size):
            calls.clear()
            some = records.take(slice(start, start + batch_size))
            outputs = logits_of(call_model(model, some.inputs))
            if outputs is not None:
                count(LOGITS, outputs)
    return {name: total / len(records) for name, total in totals.items()}


class WeightNorms(Diagnostic[dict[str, float]]):
    """`weight_norms` by epoch."""

    reads = ""

    def __init__(self, *, every: int | None = None) -> None:
        super().__init__(every=every)

    def measure(self, trainer: Trainer, records: Records) -> dict[str, float]:
        return weight_norms(trainer.model)

    def plot(self, path: str | os.PathLike[str]) -> None:
        from tacit.report.norms import plot_norms

        plot_norms({"weights": self}, path)


class ActivationNorms(Diagnostic[dict[str, float]]):
    """`activation_norms` by epoch. **Not private: reads pre-activations.**"""

    reads = "pre-activations"

    def measure(self, trainer: Trainer, records: Records) -> dict[str, float]:
        return activation_norms(trainer.model, records)

    def plot(self, path: str | os.PathLike[str]) -> None:
        from tacit.report.norms import plot_norms

        plot_norms({"pre-activations": self}, path)


def _norms(h: Tensor) -> Tensor:
    """‖h‖ of each row."""
    return torch.linalg.vector_norm(h.reshape(len(h), -1), dim=1, dtype=torch.float64)
