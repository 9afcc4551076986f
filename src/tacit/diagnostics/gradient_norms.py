"""Norms of single records' gradients beside their bounds. Not private: reads raw gradients."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tacit.data.records import Records
from tacit.errors import UnboundedLayer
from tacit.lipschitz.propagate import propagate
from tacit.losses.pre_activations import watched
from tacit.losses.record_losses import losses_of
from tacit.pytrees import call_model
from tacit.queries.bounded_gradient import Loss, trainable

NOT_PRIVATE = "not private: reads raw gradients"


@dataclass(frozen=True)
class GradientNorms:
    """‖∇_θ ℓ‖ of each record and parameter θ, and the largest that it can be where that is known.

    **Not private: reads raw gradients.** To look at on data that may be looked at; a figure of
    private records is a release that nobody paid for.
    """

    norms: Mapping[str, Tensor] = field(repr=False)
    bounds: Mapping[str, float]
    notice: str = NOT_PRIVATE

    def tightness(self) -> dict[str, float]:
        """The largest norm seen over the bound: below 1, and near it where no noise is wasted."""
        return {n: float(self.norms[n].max()) / b for n, b in self.bounds.items() if b > 0}

    def text(self, width: int = 110) -> str:
        """A table that begins with the notice."""
        columns = ("parameter", "median", "95%", "largest", "bound", "largest/bound")
        table = Table(*columns, title=f"gradient norms; {self.notice}", title_justify="left")
        shares = self.tightness()
        for name, norms in self.norms.items():
            middle, most = norms.quantile(torch.tensor([0.5, 0.95], dtype=norms.dtype)).tolist()
            bound = f"{self.bounds[name]:.4g}" if name in self.bounds else "none"
            share = f"{shares[name]:.1%}" if name in shares else ""
            table.add_row(name, *(f"{v:.4g}" for v in (middle, most, norms.max())), bound, share)
        console = Console(file=io.StringIO(), width=width, force_terminal=False)
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Norms and bounds of each parameter, as a picture that bears the notice."""
        from tacit.report.gradient_norms import plot_gradient_norms

        plot_gradient_norms(self, path)


def gradient_histogram(
    model: nn.Module, loss: Loss, records: Records, *, max_records: int = 256
) -> GradientNorms:
    """Each record's gradient norm of each parameter. **Not private: reads raw gradients.**

    The first `max_records` records, each alone through the model: right for every module, and as
    slow as that. The bounds are those that the clipless route would use, for weights in their
    sets; a network or a loss without a constant has none.
    """
    if not len(records) or max_records < 1:
        raise ValueError(f"{len(records)} records and max_records={max_records}; give at least one")
    parameters = trainable(model)
    device = next(iter(parameters.values())).device
    rows: dict[str, list[float]] = {name: [] for name in parameters}
    for i in range(min(len(records), max_records)):
        one = records.take(slice(i, i + 1)).to(device)
        with torch.enable_grad():
            with watched(model, loss):
                value = losses_of(loss, call_model(model, one.inputs), one.targets).sum()
            found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, found, strict=True):
            rows[name].append(0.0 if gradient is None else _norm(gradient))
    norms = {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}
    return GradientNorms(norms, _bounds(model, loss, records.shape))


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


def _bounds(model: nn.Module, loss: Loss, shape: tuple[int, ...]) -> dict[str, float]:
    try:
        return dict(propagate(model, loss, shape).by_parameter)
    except UnboundedLayer:
        return {}
