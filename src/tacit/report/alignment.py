"""The cosine between clipped and unclipped gradients by epoch, as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tacit.report.canvas import blank, one_notice, save

if TYPE_CHECKING:
    from tacit.diagnostics.alignment import ClippingAlignment


def plot_alignment(runs: Mapping[str, ClippingAlignment], path: str | os.PathLike[str]) -> None:
    """The median over batches, a line a run, within a band from the least to the largest."""
    figure, axes = blank()
    panel = axes[0, 0]
    for label, run in runs.items():
        epochs = [p.epoch for p in run.points]
        least = [float(p.value.nan_to_num(0.0).min()) for p in run.points]
        most = [float(p.value.nan_to_num(0.0).max()) for p in run.points]
        middle = [float(p.value.nan_to_num(0.0).median()) for p in run.points]
        (line,) = panel.plot(epochs, middle, marker=".", label=label)
        panel.fill_between(epochs, least, most, alpha=0.2, color=line.get_color())
    panel.set_xlabel("epoch")
    panel.set_ylabel("cosine of clipped and unclipped sum")
    panel.set_ylim(top=1.02)
    panel.grid(alpha=0.3)
    if any(runs):
        panel.legend(fontsize=8)
    save(figure, path, one_notice({run.notice for run in runs.values()}))
