"""`tacit report` and `tacit compare`: pages of HTML from the folders of runs."""

from __future__ import annotations

from pathlib import Path

import typer


def report(
    folder: Path = typer.Argument(..., help="Folder of a run, as tacit train makes it."),
    out: Path | None = typer.Option(
        None, help="File to write. Default: report.html in the run's folder."
    ),
) -> None:
    """Write a page that shows a run: one HTML file that loads nothing.

    Metrics against ε, trade-off curve, certificate, settings, the privacy statement in plain words,
    and what ε does not cover.

    Example: tacit report runs/x
    """
    from tacit.report.page import write_page

    typer.echo(f"written to {write_page(folder, out)}")


def compare(
    folders: list[Path] = typer.Argument(..., metavar="RUN...", help="Folders of 2 to 12 runs."),
    out: Path = typer.Option(Path("compare.html"), help="File to write."),
) -> None:
    """Write one page that compares several runs.

    Example: tacit compare runs/a runs/b --out compare.html
    """
    from tacit.report.comparison import compare

    typer.echo(f"written to {compare(folders, out)}")
