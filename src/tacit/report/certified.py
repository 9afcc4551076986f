"""Certified accuracy against the radius, as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tacit.certificates.accuracy import CertifiedAccuracy

_MOST_STEPS = 400


def plot_certified(results: Mapping[str, CertifiedAccuracy], path: str | os.PathLike[str]) -> None:
    """One curve a model, by name: the share right and certified at every radius."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from tacit.certificates.accuracy import PIXEL

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    last = max(result.radii[-1] for result in results.values()) or 1.0
    grid = [last * i / _MOST_STEPS for i in range(_MOST_STEPS + 1)]
    for name, result in results.items():
        (line,) = axes.plot(grid, [100 * result.at(r) for r in grid], label=name)
        shares = [100 * share for share in result.shares]
        axes.plot(result.radii, shares, "o", markersize=4, color=line.get_color())
    units = {result.unit for result in results.values()}
    axes.set_xlabel(
        "L2 radius (1/255)" if units == {PIXEL} else "L2 radius (in the results' units)"
    )
    axes.set_ylabel("right and certified (%)")
    axes.set_ylim(0, 102)
    axes.set_xlim(0, last * 1.02)
    axes.grid(alpha=0.3)
    if len(results) > 1:
        axes.legend()
    records = " and ".join(sorted({f"{r.num_records:,}" for r in results.values()}))
    axes.set_title(f"certified accuracy on {records} held-out records")
    figure.savefig(path, dpi=120)
