"""Gradient norms of single records beside their bounds, as a picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tacit.diagnostics.gradient_norms import GradientNorms


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
