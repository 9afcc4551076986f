"""Facts as a table for people, or as one JSON object for machines."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tacit.report.run_folder import to_json


def show(facts: dict[str, Any], as_json: bool, title: str) -> None:
    if as_json:
        typer.echo(to_json(facts))
        return
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), shown)
    Console().print(table)
