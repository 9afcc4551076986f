"""Figures without a screen, and the notice that goes on top of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def blank(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.4, 4.2)
) -> tuple[Figure, np.ndarray]:
    """A figure of `size` inches, and its axes as an array (rows, columns)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Figure, path: str | os.PathLike[str], notice: str | None = None) -> None:
    """Write the figure; `notice` stands above it, in red where it says "not private"."""
    if notice and "not private" in notice:
        figure.suptitle(notice.upper(), fontsize=11, color="tab:red")
    elif notice:
        figure.suptitle(notice, fontsize=10)
    figure.savefig(path, dpi=120)


def one_notice(notices: set[str]) -> str:
    """What several diagnostics in one figure say, once."""
    return "; ".join(sorted(notices))
