"""Norms of single records' gradients, beside their bounds and by epoch.

Norms of single records' gradients beside their bounds. Not private: reads raw gradients.

Gradient norms of single records beside their bounds, as a picture.

Norms of whole gradients of single records, by epoch.  [Losing Less, Figs. 6 and 14]

Histograms of single records' gradient norms, as a picture.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tacit.canvas import blank, one_notice, save
from tacit.diagnostics.diagnostic import Diagnostic
from tacit.errors import UnboundedLayer
from tacit.lipschitz.propagation import propagate
from tacit.losses.per_record import losses_of
from tacit.losses.pre_activations import watched
from tacit.pytrees import call_model
from tacit.queries.bounded_gradient import Loss, trainable
from tacit.records import Records

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer

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


def plot_gradient_norms(found: GradientNorms, path: str | os.PathLike[str]) -> None:
    """One column a parameter, from input to output: a box of the norms, and a bar at the bound.

    The box holds the middle half of the records, its whiskers all of them. Above a bar stands how
    much of the bound the largest norm reached.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(found.norms)
    columns = list(range(1, len(names) + 1))
    figure = Figure(figsize=(max(5.0, 1.6 + 0.75 * len(names)), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    # A norm of 0 has no place on a logarithmic axis.
    rows = [found.norms[name] for name in names]
    shown = [[float(v) for v in row if v > 0] or [float("nan")] for row in rows]
    axes.boxplot(shown, positions=columns, widths=0.55, whis=(0, 100))
    shares = found.tightness()
    for column, name in zip(columns, names, strict=True):
        if name not in found.bounds:
            continue
        bound = found.bounds[name]
        axes.hlines(bound, column - 0.35, column + 0.35, color="tab:red", linewidth=2)
        if name in shares:
            at = (column, bound)
            axes.annotate(
                f"{shares[name]:.0%}", at, (0, 4), textcoords="offset points", ha="center",
                fontsize=8, color="tab:red",
            )  # fmt: skip
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_xticks(columns, names, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("gradient norm of one record")
    axes.grid(axis="y", alpha=0.3)
    bars = "red: the bound, and the share of it reached" if found.bounds else "no bounds known"
    axes.set_title(bars, fontsize=9)
    figure.suptitle(found.notice.upper(), fontsize=11, color="tab:red")
    figure.savefig(path, dpi=120)


class GradientNormHistory(Diagnostic[GradientNorms]):
    """`gradient_histogram` by epoch. **Not private: reads raw gradients.**"""

    reads = "raw gradients"

    def measure(self, trainer: Trainer, records: Records) -> GradientNorms:
        return gradient_histogram(trainer.model, trainer.loss, records, max_records=len(records))

    def plot(self, path: str | os.PathLike[str], *, max_norm: float | None = None) -> None:
        """A histogram of ‖g_i‖ for each epoch; `max_norm` marks the clipping constant."""

        plot_gradient_norm_histograms({"": self}, path, max_norm=max_norm)


def whole_norms(found: GradientNorms) -> Tensor:
    """‖g_i‖ of each record over all parameters."""
    return torch.stack(list(found.norms.values())).square().sum(dim=0).sqrt()


_MOST_PANELS = 4


def plot_gradient_norm_histograms(
    runs: Mapping[str, GradientNormHistory],
    path: str | os.PathLike[str],
    *,
    max_norm: float | None = None,
) -> None:
    """A panel for up to four of the measurements, the first and the last among them.

    One histogram a run, on common logarithmic bins; the bar is the clipping constant `max_norm`.
    """

    count = max(len(run.points) for run in runs.values())
    shown = sorted({round(i) for i in np.linspace(0, count - 1, min(count, _MOST_PANELS))})
    norms = {
        (label, place): whole_norms(run.points[place].value).numpy()
        for label, run in runs.items()
        for place in shown
        if place < len(run.points)
    }
    everything = np.concatenate(list(norms.values()))
    positive = everything[everything > 0]
    least, most = (positive.min(), positive.max()) if len(positive) else (0.1, 1.0)
    bins = np.geomspace(least / 1.05, most * 1.05, 41)
    figure, axes = blank(1, len(shown), (3.2 * len(shown) + 0.6, 3.4))
    for panel, place in zip(axes.flat, shown, strict=True):
        for label, run in runs.items():
            if place >= len(run.points):
                continue
            panel.hist(
                norms[label, place], bins=bins, histtype="stepfilled", alpha=0.5, label=label
            )
            panel.set_title(f"epoch {run.points[place].epoch:.3g}", fontsize=9)
        panel.set_xscale("log")
        if len(positive):
            panel.set_yscale("log")
        panel.set_xlabel("gradient norm of one record")
        panel.grid(alpha=0.3)
        if max_norm is not None:
            panel.axvline(max_norm, color="tab:red", linewidth=1.5)
    axes.flat[0].set_ylabel("records")
    if any(runs):
        axes.flat[0].legend(fontsize=8)
    notice = one_notice({run.notice for run in runs.values()})
    save(figure, path, notice)
