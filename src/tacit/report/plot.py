"""Accuracy and loss against ε, as a picture."""

from __future__ import annotations

import os
from typing import Any


def plot_history(facts: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Held-out accuracy (left) and loss (right) at each evaluation, against the ε spent by then."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    history = facts["history"]
    epsilons = [point["epsilon"] for point in history]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, loss = figure.subplots(1, 2)
    accuracy.plot(epsilons, [100 * p["accuracy"] for p in history], marker="o", markersize=3)
    accuracy.set_ylabel("held-out accuracy (%)")
    loss.plot(epsilons, [p["loss"] for p in history], marker="o", markersize=3, color="tab:red")
    loss.set_ylabel("held-out loss")
    for axes in (accuracy, loss):
        axes.set_xlabel(f"ε spent (PLD, δ = {facts['delta']:g}, {facts['relation']})")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{facts['sampling']}, noise multiplier {facts['noise_multiplier']:.4g}")
    figure.savefig(path, dpi=120)
