"""Held-out accuracy against ε with its spread over runs, as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tacit.report.canvas import blank, save

if TYPE_CHECKING:
    from tacit.diagnostics.accuracy_curve import AnyRun


def plot_accuracy_against_epsilon(
    groups: Mapping[str, Sequence[AnyRun]], path: str | os.PathLike[str], *, title: str = ""
) -> None:
    """A median line and a band from least to largest for each group of runs, by name."""
    from tacit.diagnostics.accuracy_curve import accuracy_curve

    figure, axes = blank()
    panel = axes[0, 0]
    for name, runs in groups.items():
        curve = accuracy_curve(runs)
        least, middle, most = (
            [100 * share for share in shares]
            for shares in (curve.least, curve.median, curve.largest)
        )
        label = f"{name} ({curve.num_runs} runs)"
        (line,) = panel.plot(curve.epsilons, middle, label=label)
        panel.fill_between(curve.epsilons, least, most, alpha=0.2, color=line.get_color())
        for edge in (least, most):
            panel.plot(curve.epsilons, edge, linewidth=0.6, color=line.get_color())
    panel.set_xlabel("ε spent")
    panel.set_ylabel("held-out accuracy (%)")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, loc="lower right", title="median; band: least to largest")
    if title:
        panel.set_title(title)
    save(figure, path)
