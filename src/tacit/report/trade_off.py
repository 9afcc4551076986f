"""Type I against type II error, as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr, ndtri

if TYPE_CHECKING:
    from tacit.accounting.gaussian_dp import GaussianDpEstimate
    from tacit.accounting.trade_off import TradeOff

REFERENCES = (0.5, 1.0, 2.0)
NOT_A_GUARANTEE = "CLT, not a guarantee"
_GREY = "0.55"


def plot_trade_offs(
    curves: Mapping[str, TradeOff],
    path: str | os.PathLike[str],
    limits: Mapping[str, GaussianDpEstimate] | None = None,
    title: str = "the best test for one record's presence",
) -> None:
    """Each run's exact curve, by name; its CLT curve dashed; G_μ and the perfect 1 − α in grey.

    A test's errors lie on or above the curve of its run. The nearer a curve is to 1 − α, the less
    there is to see.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not curves:
        raise ValueError("no curves to draw; give at least one, by name")
    figure = Figure(figsize=(5.8, 5.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    # Dense at both ends, where curves bend.
    alphas = np.concatenate([[0.0], ndtr(np.linspace(-6, 6, 601)), [1.0]])
    axes.plot([0, 1], [1, 0], color=_GREY, linewidth=1)
    axes.text(0.53, 0.53, "perfect: 1 − α", rotation=-45, ha="center", va="center",
              rotation_mode="anchor", color=_GREY)  # fmt: skip
    for mu in REFERENCES:
        axes.plot(alphas, ndtr(-ndtri(alphas) - mu), color=_GREY, linewidth=0.8, linestyle=":")
        at = float(ndtr(-mu / 2))
        axes.annotate(
            f"$G_{{{mu:g}}}$", (at, at), (-1, -1), textcoords="offset points",
            ha="right", va="top", color=_GREY,
        )  # fmt: skip
    for number, (name, curve) in enumerate(curves.items()):
        colour = f"C{number}"
        # Wide and pale, so that a limit that agrees with it is seen on top of it.
        label = f"{name} (exact)"
        axes.plot(alphas, curve(alphas), color=colour, linewidth=3.5, alpha=0.55, label=label)
        limit = (limits or {}).get(name)
        if limit is not None and np.isfinite(limit.mu):
            words = NOT_A_GUARANTEE if limit.approximate else "exactly Gaussian"
            label = f"$G_{{{limit.mu:.2f}}}$ ({words})"
            axes.plot(alphas, limit(alphas), color=colour, linestyle="--", label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.set_xlabel("type I error α: a record is seen that is not there")
    axes.set_ylabel("type II error f(α): a record is missed that is")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize=9)
    axes.set_title(title, fontsize=11)
    figure.savefig(path, dpi=120)
