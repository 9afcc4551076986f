"""Norms of weights, pre-activations, logits and inputs.  [Losing Less, Figs. 1 and 5]"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tacit.canvas import blank, save
from tacit.data.scaling import HSV, RGB, YIQ, YUV, Greyscale, Scaler
from tacit.diagnostics.diagnostic import Diagnostic, save_runs, text_table
from tacit.losses.tailored import layers_of
from tacit.pytrees import call_model, logits_of
from tacit.queries.bounded_gradient import trainable
from tacit.records import Records
from tacit.training.evaluation import pieces_of

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
        for piece in pieces_of(records, batch_size, model):
            calls.clear()
            outputs = logits_of(call_model(model, piece.inputs))
            if outputs is not None:
                count(LOGITS, outputs)
    return {name: total / len(records) for name, total in totals.items()}


def _norms(h: Tensor) -> Tensor:
    """‖h‖ of each row."""
    return torch.linalg.vector_norm(h.reshape(len(h), -1), dim=1, dtype=torch.float64)


def plot_norms(
    runs: Mapping[str, Diagnostic[dict[str, float]]], path: str | os.PathLike[str]
) -> None:
    """A panel for each weight or layer, and in it a line for each run, by name."""
    names = list(dict.fromkeys(n for run in runs.values() for p in run.points for n in p.value))
    columns = min(4, max(len(names), 1))
    rows = math.ceil(len(names) / columns) or 1
    figure, axes = blank(rows, columns, (2.8 * columns + 0.6, 2.2 * rows + 0.8))
    for i, panel in enumerate(axes.flat):
        if i >= len(names):
            panel.set_visible(False)
            continue
        name = names[i]
        for label, run in runs.items():
            points = [p for p in run.points if name in p.value]
            epochs = [p.epoch for p in points]
            panel.plot(epochs, [p.value[name] for p in points], marker=".", label=label)
        panel.set_title(name, fontsize=9)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        if i >= len(names) - columns:
            panel.set_xlabel("epoch")
        if i % columns == 0:
            panel.set_ylabel("L2 norm")
    if len(runs) > 1:
        axes.flat[0].legend(fontsize=8)
    save_runs(figure, path, runs)


class WeightNorms(Diagnostic[dict[str, float]]):
    """`weight_norms` by epoch."""

    reads = ""
    draw = staticmethod(plot_norms)

    def __init__(self, *, every: int | None = None) -> None:
        super().__init__(every=every)

    def measure(self, trainer: Trainer, records: Records) -> dict[str, float]:
        return weight_norms(trainer.model)


class ActivationNorms(Diagnostic[dict[str, float]]):
    """`activation_norms` by epoch. **Not private: reads pre-activations.**"""

    reads = "pre-activations"
    draw = staticmethod(plot_norms)

    def measure(self, trainer: Trainer, records: Records) -> dict[str, float]:
        return activation_norms(trainer.model, records)


SPACES: tuple[Scaler, ...] = (RGB(), HSV(), YIQ(), YUV(), Greyscale())


@dataclass(frozen=True)
class InputNorms:
    """‖x‖ of each record, under the name of the space that it is in.

    **Not private: reads raw inputs.** The closer together the norms lie, the less of a bound X on
    them is wasted: `spread` is their standard deviation over their mean.
    """

    norms: Mapping[str, Tensor] = field(repr=False)
    notice: str = "not private: reads raw inputs"

    def spread(self) -> dict[str, float]:
        return {
            name: float(n.std(correction=0) / n.mean().clamp_min(1e-300))
            for name, n in self.norms.items()
        }

    def text(self, width: int = 100) -> str:
        """A table that begins with the notice."""
        columns = ("space", "mean norm", "largest", "spread")
        rows = [
            [name, f"{n.mean():.4g}", f"{n.max():.4g}", f"{self.spread()[name]:.1%}"]
            for name, n in self.norms.items()
        ]
        return text_table(f"input norms; {self.notice}", columns, rows, width)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Histograms over one another, as a picture that bears the notice."""
        plot_input_norms(self, path)


def input_norms(
    records: Records, spaces: Sequence[Scaler] = SPACES, *, max_records: int = 10_000
) -> InputNorms:
    """The norms of the first `max_records` inputs, RGB images in [0, 1], in each space.

    **Not private: reads raw inputs.** For the choice of a colour space, on public records
    [Béthune 2024, Fig. 8]. Any scalers may be given in the place of colour spaces.
    """
    if not len(records) or not spaces:
        raise ValueError(f"{len(records)} records in {len(spaces)} spaces; give at least one")
    inputs = records.inputs[:max_records]
    return InputNorms(
        {
            type(space).__name__: torch.linalg.vector_norm(
                space(inputs).flatten(1), dim=1, dtype=torch.float64
            ).cpu()
            for space in spaces
        }
    )


def plot_input_norms(measured: InputNorms, path: str | os.PathLike[str]) -> None:
    """One histogram per space, over norms divided by their mean: what matters is the spread."""
    figure, panels = blank()
    axes = panels[0, 0]
    for name, spread in measured.spread().items():
        norms = measured.norms[name]
        relative = (norms / norms.mean().clamp_min(1e-300)).tolist()
        label = f"{name}, mean {norms.mean():.3g}, spread {spread:.0%}"
        axes.hist(relative, bins=60, density=True, histtype="step", label=label)
    axes.set(xlabel="norm of the input over its mean", ylabel="density")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path, measured.notice)
