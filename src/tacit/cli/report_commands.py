"""`tacit report`, `compare`, `statement` and `verify`: what folders of runs say, and whether so."""

from __future__ import annotations

from pathlib import Path

import typer

from tacit.cli.console import JSON, print_json
from tacit.errors import StatementRefused


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


def statement(
    folder: Path = typer.Argument(..., help="Folder of a run, as tacit train makes it."),
    as_json: bool = JSON,
) -> None:
    """Print the privacy statement of a run in plain words, as Markdown.

    With --json it is what statement.json in the folder holds.

    Example: tacit statement runs/x > PRIVACY.md
    """
    from tacit.report.saved_facts import statement

    found = statement(folder)
    if as_json:
        print_json(dict(found.content))
    else:
        typer.echo(found.markdown(), nl=False)


def verify(
    file: Path = typer.Argument(..., help="A statement.json, or the folder that it is in."),
    ledger: Path | None = typer.Option(None, help="The ledger that the run was charged to."),
    as_json: bool = JSON,
) -> None:
    """Compute every figure of a privacy statement again, and name those that are wrong.

    ε, μ and the trade-off curve follow from the events in the statement. With --ledger, its head
    and its plans are compared too: without it, nothing says that the events took place.

    Example: tacit verify runs/x/statement.json --ledger runs/x/ledger.sqlite
    """
    from tacit.report.privacy_statement import read_stored
    from tacit.report.statement_check import check_statement

    found = check_statement(file, ledger)
    if as_json:
        facts = {"wrong": found.wrong, "checked": found.checked, "unchecked": found.unchecked}
        print_json({"verified": found.holds, **facts})
        if not found.holds:
            raise typer.Exit(2)
        return
    if not found.holds:
        raise StatementRefused(
            f"{file} does not hold:\n" + "\n".join(f"- {text}" for text in found.wrong)
        )
    stated = read_stored(file)
    typer.echo(f"it holds: epsilon {stated.epsilon:.6g} at delta {stated.delta:g}")
    typer.echo(f"checked: {', '.join(found.checked)}")
    for text in found.unchecked:
        typer.echo(f"not checked: {text}")
