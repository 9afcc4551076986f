"""`tacit data`: what datasets there are, and fetching one."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from tacit.cli import accounting_options as options
from tacit.cli.output import show
from tacit.data.catalogue import available
from tacit.data.loading import load
from tacit.report.run_folder import to_json


def data(
    name: str | None = typer.Argument(None, help="A dataset to fetch, verify and describe."),
    as_json: bool = options.JSON,
) -> None:
    """List the named datasets, or fetch, verify and describe one.

    Example: tacit data fashion-mnist
    """
    if name is None:
        if as_json:
            typer.echo(to_json({"datasets": list(available())}))
            return
        table = Table("dataset", title="tacit.load(name), tacit train --dataset name")
        for known in available():
            table.add_row(known)
        Console().print(table)
        return
    train, test = load(name)
    facts = {
        "name": train.name,
        "train_records": train.public_size,
        "test_records": test.public_size,
        "shape": "×".join(map(str, train.shape)),
        "classes": train.num_classes,
        "notes": list(train.notes) if as_json else "\n".join(train.notes),
    }
    show(facts, as_json, "dataset")
