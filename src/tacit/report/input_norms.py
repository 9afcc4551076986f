"""Histograms of input norms, as a picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tacit.diagnostics.input_norms import InputNorms


def plot_input_norms(found: InputNorms, path: str | os.PathLike[str]) -> None:
    """One histogram a space, over norms divided by their mean: what matters is the spread."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, spread in found.spread().items():
        norms = found.norms[name]
        relative = (norms / norms.mean().clamp_min(1e-300)).tolist()
        label = f"{name}, mean {norms.mean():.3g}, spread {spread:.0%}"
        axes.hist(relative, bins=60, density=True, histtype="step", label=label)
    axes.set_xlabel("norm of the input over its mean")
    axes.set_ylabel("density")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.suptitle(found.notice.upper(), fontsize=11, color="tab:red")
    figure.savefig(path, dpi=120)
