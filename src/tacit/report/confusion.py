"""Confusion matrices by epoch, as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tacit.report.canvas import blank, one_notice, save

if TYPE_CHECKING:
    from tacit.diagnostics.confusion import ConfusionHistory

_MOST_PANELS = 4


def plot_confusion(
    runs: Mapping[str, ConfusionHistory],
    path: str | os.PathLike[str],
    *,
    classes: Sequence[str] | None = None,
) -> None:
    """A row a run, a column for up to four measurements, the first and the last among them.

    Each row of a matrix is divided by its sum, in percent: the diagonal is the accuracy by class.
    """
    count = min(len(run.points) for run in runs.values())
    shown = sorted({round(i) for i in np.linspace(0, count - 1, min(count, _MOST_PANELS))})
    figure, axes = blank(len(runs), len(shown), (3.3 * len(shown) + 0.4, 3.4 * len(runs) + 0.5))
    figure.set_layout_engine("compressed")  # panels of a fixed shape would overlap otherwise
    for row, (label, run) in zip(axes, runs.items(), strict=True):
        for panel, place in zip(row, shown, strict=True):
            point = run.points[place]
            counts = point.value.double()
            shares = (100 * counts / counts.sum(dim=1, keepdim=True).clamp_min(1)).numpy()
            panel.imshow(shares, vmin=0, vmax=100, cmap="Blues")
            for (i, j), share in np.ndenumerate(shares):
                if share >= 0.5:
                    colour = "white" if share > 55 else "black"
                    panel.text(
                        j, i, f"{share:.0f}", ha="center", va="center", fontsize=6, color=colour
                    )
            right = float(counts.diagonal().sum() / counts.sum().clamp_min(1))
            name = f"{label}, " if label else ""
            panel.set_title(f"{name}epoch {point.epoch:.3g}: {right:.1%}", fontsize=9)
            names = classes or [str(k) for k in range(len(shares))]
            panel.set_xticks(range(len(shares)), names, fontsize=7, rotation=90 if classes else 0)
            panel.set_yticks(range(len(shares)), names, fontsize=7)
        row[0].set_ylabel("true class")
    for panel in axes[-1]:
        panel.set_xlabel("taken for")
    save(figure, path, one_notice({run.notice for run in runs.values()}))
