"""Gradient norms of single records, with their bounds and by epoch.  [Losing Less, Fig. 6]"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from tacit.canvas import blank, save
from tacit.diagnostics.diagnostic import (
    Diagnostic,
    losses_on,
    save_runs,
    shown_points,
    text_table,
)
from tacit.errors import UnboundedLayer
from tacit.lipschitz.propagation import propagate
from tacit.queries.bounded_gradient import Loss, trainable
from tacit.records import Records

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer

NOT_PRIVATE = "not private: reads raw gradients"


@dataclass(frozen=True)
class GradientNorms:
    """‖∇_θ ℓ‖ of each record and parameter θ, and its bound where that is known.

    **Not private: reads raw gradients.** A figure of private records is an uncharged release.
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
        shares, rows = self.tightness(), []
        for name, norms in self.norms.items():
            middle, most = norms.quantile(torch.tensor([0.5, 0.95], dtype=norms.dtype)).tolist()
            bound = f"{self.bounds[name]:.4g}" if name in self.bounds else "none"
            share = f"{shares[name]:.1%}" if name in shares else ""
            rows.append([name, *(f"{v:.4g}" for v in (middle, most, norms.max())), bound, share])
        return text_table(f"gradient norms; {self.notice}", columns, rows, width)

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
        value = losses_on(model, loss, one).sum()
        found = torch.autograd.grad(value, list(parameters.values()), materialize_grads=True)
        for name, gradient in zip(parameters, found, strict=True):
            rows[name].append(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)))
    norms = {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}
    return GradientNorms(norms, _bounds(model, loss, records.shape))


def _bounds(model: nn.Module, loss: Loss, shape: tuple[int, ...]) -> dict[str, float]:
    try:
        return dict(propagate(model, loss, shape).by_parameter)
    except UnboundedLayer:
        return {}


def plot_gradient_norms(found: GradientNorms, path: str | os.PathLike[str]) -> None:
    """One column per parameter, from input to output: a box of the norms, a bar at the bound.

    The box holds the middle half of the records, its whiskers all of them. Above a bar stands how
    much of the bound the largest norm reached.
    """
    names = list(found.norms)
    columns = list(range(1, len(names) + 1))
    figure, panels = blank(size=(max(5.0, 1.6 + 0.75 * len(names)), 4.6))
    axes = panels[0, 0]
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
    save(figure, path, found.notice)


def whole_norms(found: GradientNorms) -> Tensor:
    """‖g_i‖ of each record over all parameters."""
    return torch.stack(list(found.norms.values())).square().sum(dim=0).sqrt()


def plot_gradient_norm_histograms(
    runs: Mapping[str, Diagnostic[GradientNorms]],
    path: str | os.PathLike[str],
    *,
    max_norm: float | None = None,
) -> None:
    """A panel for up to four of the measurements, the first and the last among them.

    One histogram per run, on common logarithmic bins; the bar is the clipping constant `max_norm`.
    """
    shown = shown_points(max(len(run.points) for run in runs.values()))
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
    save_runs(figure, path, runs)


class GradientNormHistory(Diagnostic[GradientNorms]):
    """`gradient_histogram` by epoch. **Not private: reads raw gradients.**

    `plot(path, max_norm=C)` marks the clipping constant.
    """

    reads = "raw gradients"
    draw = staticmethod(plot_gradient_norm_histograms)

    def measure(self, trainer: Trainer, records: Records) -> GradientNorms:
        return gradient_histogram(trainer.model, trainer.loss, records, max_records=len(records))
