"""Figures without a screen, the notice that goes on top of them, and tables."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

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


def facts_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values."""
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def table_text(table: Table, width: int) -> str:
    """The table as plain text, `width` characters wide at most."""
    text = io.StringIO()
    # Plain in a notebook too, where rich would write HTML or colour codes.
    console = Console(file=text, width=width, color_system=None, force_jupyter=False)
    console.print(table)
    return text.getvalue()
