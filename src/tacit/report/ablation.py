"""An ablation: one bar a variant, with its spread over runs, as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import median

from tacit.report.canvas import blank, save


def plot_ablation(
    accuracies: Mapping[str, Sequence[float]], path: str | os.PathLike[str], *, title: str = ""
) -> None:
    """The median accuracy of each variant, whiskers from least to largest, and a dot a run."""
    if not accuracies or not all(accuracies.values()):
        raise ValueError("give at least one accuracy for each variant")
    figure, axes = blank(size=(max(4.0, 1.2 + 1.1 * len(accuracies)), 4.2))
    panel = axes[0, 0]
    for place, values in enumerate(accuracies.values()):
        percent = [100 * v for v in values]
        middle = median(percent)
        panel.bar(place, middle, width=0.6, color="tab:blue", alpha=0.5)
        spread = [[middle - min(percent)], [max(percent) - middle]]
        panel.errorbar(place, middle, yerr=spread, color="black", capsize=5)
        panel.plot([place] * len(percent), percent, ".", color="black", markersize=4)
        panel.annotate(
            f"{middle:.1f}", (place, max(percent)), (0, 5), textcoords="offset points",
            ha="center", fontsize=8,
        )  # fmt: skip
    lowest = min(min(values) for values in accuracies.values())
    highest = max(max(values) for values in accuracies.values())
    # Bars that all end near the top of an axis from 0 cannot be told apart.
    margin = max(100 * (highest - lowest), 1.0)
    bottom = max(0.0, 100 * lowest - margin)
    panel.set_ylim(bottom, min(102.0, 100 * highest + 0.35 * margin))
    cut = f"\nthe axis begins at {bottom:.3g}%" if bottom else ""
    labels = [f"{name}\n({len(values)} runs)" for name, values in accuracies.items()]
    panel.set_xticks(range(len(labels)), labels, fontsize=8)
    panel.set_ylabel("held-out accuracy (%)")
    panel.grid(axis="y", alpha=0.3)
    panel.set_title(f"bars: median; whiskers: least and largest{cut}", fontsize=8)
    save(figure, path, title)
