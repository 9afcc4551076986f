"""Histograms of single records' gradient norms, as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tacit.report.canvas import blank, one_notice, save

if TYPE_CHECKING:
    from tacit.diagnostics.gradient_norm_history import GradientNormHistory

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
    from tacit.diagnostics.gradient_norm_history import whole_norms

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
