"""What a command prints: one JSON object for machines, or a table for people."""

from __future__ import annotations

from typing import Any

import typer

JSON = typer.Option(False, "--json", help="Print one JSON object and nothing else.")


def print_json(facts: dict[str, Any]) -> None:
    from tacit.report import to_json

    typer.echo(to_json(facts))


def print_facts(facts: dict[str, Any], as_json: bool, title: str) -> None:
    """Facts as JSON, or as a table of two columns."""
    from rich.console import Console
    from rich.table import Table

    if as_json:
        print_json(facts)
        return
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), shown)
    Console().print(table)
