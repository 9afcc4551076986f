"""Gradients of single records: their norms, and what clipping does to the direction of their sum.

[Losing Less, Figs. 1d, 6 and 7]
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from tacit.canvas import band, blank, save
from tacit.diagnostics.diagnostic import (
    Diagnostic,
    flattened,
    gradients_of,
    losses_on,
    save_runs,
    shown_points,
    text_table,
)
from tacit.errors import UnboundedLayer
from tacit.lipschitz.propagation import propagate
from tacit.queries.bounded_gradient import GradientQuery, Loss, trainable
from tacit.records import Records
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import batch_of
from tacit.training.evaluation import pieces_of

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer


@dataclass(frozen=True)
class GradientNorms:
    """‖∇_θ ℓ‖ of each record and parameter θ, and its bound where that is known.

    **Not private: reads raw gradients.** A figure of private records is an uncharged release.
    """

    norms: Mapping[str, Tensor] = field(repr=False)
    bounds: Mapping[str, float]
    notice: str = "not private: reads raw gradients"

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
        one = records.take(slice(i, i + 1)).to(device).read()
        for name, gradient in gradients_of(losses_on(model, loss, one).sum(), parameters).items():
            rows[name].append(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)))
    norms = {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}
    try:
        bounds = dict(propagate(model, loss, records.shape).by_parameter)
    except UnboundedLayer:
        bounds = {}
    return GradientNorms(norms, bounds)


def plot_gradient_norms(measured: GradientNorms, path: str | os.PathLike[str]) -> None:
    """One column per parameter, from input to output: a box of the norms, a bar at the bound.

    The box holds the middle half of the records, its whiskers all of them. Above a bar stands how
    much of the bound the largest norm reached.
    """
    names = list(measured.norms)
    columns = list(range(1, len(names) + 1))
    figure, panels = blank(size=(max(5.0, 1.6 + 0.75 * len(names)), 4.6))
    axes = panels[0, 0]
    # A norm of 0 has no place on a logarithmic axis.
    rows = [measured.norms[name] for name in names]
    shown = [[float(v) for v in row if v > 0] or [float("nan")] for row in rows]
    axes.boxplot(shown, positions=columns, widths=0.55, whis=(0, 100))
    shares = measured.tightness()
    for column, name in zip(columns, names, strict=True):
        if name not in measured.bounds:
            continue
        bound = measured.bounds[name]
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
    bars = "red: the bound, and the share of it reached" if measured.bounds else "no bounds known"
    axes.set_title(bars, fontsize=9)
    save(figure, path, measured.notice)


def whole_norms(measured: GradientNorms) -> Tensor:
    """‖g_i‖ of each record over all parameters."""
    return torch.stack(list(measured.norms.values())).square().sum(dim=0).sqrt()


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


def clipping_alignment(
    model: nn.Module, loss: Loss, records: Records, query: GradientQuery, *, batch_size: int = 64
) -> Tensor:
    """cos(Σ_i clip(g_i), Σ_i g_i) of each batch of `batch_size` records, without noise.

    **Not private: reads raw gradients.** 1 where clipping only shortens the sum, 0 where nothing
    of its direction is left; NaN for a sum that is zero. `query` clips.
    """
    cosines, parameters = [], trainable(model)
    for piece in pieces_of(records, batch_size, model):
        batch = batch_of(piece.inputs, piece.targets, divisor=1.0, scheme=Poisson(1.0))
        clipped = {
            name: total / factor
            for block in query(model, loss, batch).blocks
            for name, total, factor in zip(
                block.names, block.sums, block.factors or (1.0,) * len(block.names), strict=True
            )
        }
        plain = gradients_of(losses_on(model, loss, piece).sum(), parameters)
        a, b = (flattened(gradients, parameters) for gradients in (clipped, plain))
        cosines.append(float(a @ b / (a.norm() * b.norm())))
    return torch.tensor(cosines, dtype=torch.float64)


def plot_alignment(runs: Mapping[str, Diagnostic[Tensor]], path: str | os.PathLike[str]) -> None:
    """The median over batches, a line per run, within a band from the least to the largest."""
    figure, axes = blank()
    panel = axes[0, 0]
    for label, run in runs.items():
        values = [p.value.nan_to_num(0.0) for p in run.points]
        rows = [[float(f(v)) for v in values] for f in (torch.min, torch.median, torch.max)]
        band(panel, [p.epoch for p in run.points], rows, marker=".", label=label)
    panel.set(xlabel="epoch", ylabel="cosine of clipped and unclipped sum")
    panel.set_ylim(top=1.02)
    panel.grid(alpha=0.3)
    if any(runs):
        panel.legend(fontsize=8)
    save_runs(figure, path, runs)


@dataclass(eq=False, repr=False, kw_only=True)
class ClippingAlignment(Diagnostic[Tensor]):
    """`clipping_alignment` by epoch, of `query` or of the run's own query.

    **Not private: reads raw gradients.**
    """

    reads = "raw gradients"
    draw = staticmethod(plot_alignment)
    query: GradientQuery | None = None
    batch_size: int = 64

    def measure(self, trainer: Trainer, records: Records) -> Tensor:
        query = self.query or trainer.mechanism.query
        return clipping_alignment(
            trainer.model, trainer.loss, records, query, batch_size=self.batch_size
        )
