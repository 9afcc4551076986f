"""Metrics against ε, as a picture."""

from __future__ import annotations

import os
from typing import Any

# The metric beside the loss, by preference: its label, and what it is multiplied by.
_BESIDE = {
    "accuracy": ("held-out accuracy (%)", 100),
    "root_mean_squared_error": ("held-out RMSE", 1),
}


def plot_history(facts: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """The held-out loss at each evaluation against the ε spent by then, beside the accuracy or,
    for a regression, the root mean squared error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    history = facts["history"]
    epsilons = [point["epsilon"] for point in history]
    beside = next((m for m in _BESIDE if all(p.get(m) is not None for p in history)), None)
    figure = Figure(figsize=(9 if beside else 4.8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    *first, loss = figure.subplots(1, 2 if beside else 1, squeeze=False)[0]
    if beside:
        label, times = _BESIDE[beside]
        values = [times * point[beside] for point in history]
        first[0].plot(epsilons, values, marker="o", markersize=3)
        first[0].set_ylabel(label)
    loss.plot(epsilons, [p["loss"] for p in history], marker="o", markersize=3, color="tab:red")
    loss.set_ylabel("held-out loss")
    for axes in (*first, loss):
        axes.set_xlabel(f"ε spent (PLD, δ = {facts['delta']:g}, {facts['relation']})")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{facts['sampling']}, noise multiplier {facts['noise_multiplier']:.4g}")
    figure.savefig(path, dpi=120)
