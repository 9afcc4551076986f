"""Norms by epoch, a panel a layer, as a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tacit.report.canvas import blank, one_notice, save

if TYPE_CHECKING:
    from tacit.diagnostics.diagnostic import Diagnostic


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
    save(figure, path, one_notice({run.notice for run in runs.values()}))
