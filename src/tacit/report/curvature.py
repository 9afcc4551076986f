"""The Hessian's largest and smallest eigenvalue by epoch, as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tacit.report.canvas import blank, one_notice, save

if TYPE_CHECKING:
    from tacit.diagnostics.curvature import Curvature


def plot_curvature(runs: Mapping[str, Curvature], path: str | os.PathLike[str]) -> None:
    """A line a run for the largest eigenvalue, and a dashed one for the smallest."""
    figure, axes = blank()
    panel = axes[0, 0]
    for label, run in runs.items():
        epochs = [p.epoch for p in run.points]
        name = f"{label}, largest" if label else "largest"
        (line,) = panel.plot(epochs, [p.value.largest for p in run.points], marker=".", label=name)
        panel.plot(
            epochs,
            [p.value.smallest for p in run.points],
            linestyle="--",
            color=line.get_color(),
            label=f"{label}, smallest" if label else "smallest",
        )
    panel.axhline(0, color="black", linewidth=0.6)
    panel.set_xlabel("epoch")
    panel.set_ylabel("eigenvalue of the Hessian")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    save(figure, path, one_notice({run.notice for run in runs.values()}))
