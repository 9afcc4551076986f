"""Figures without a screen, and the notice that goes on top of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def band(panel: Axes, x: Sequence[float], rows: Sequence[Sequence[float]], **line: Any) -> None:
    """The middle one of three rows as a line, in a band from the first to the last."""
    least, middle, most = rows
    (drawn,) = panel.plot(x, middle, **line)
    panel.fill_between(x, least, most, alpha=0.2, color=drawn.get_color())
    for edge in (least, most):
        panel.plot(x, edge, linewidth=0.6, color=drawn.get_color())


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
