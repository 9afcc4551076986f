"""`tacit data`: the named datasets, and a first schema of a table of your own."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.core import TyperGroup

from tacit.cli.console import JSON, print_facts, print_json


class _DatasetOrCommand(TyperGroup):
    """`tacit data` and `tacit data NAME` are short for `tacit data show [NAME]`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


data_app = typer.Typer(
    cls=_DatasetOrCommand,
    help="The named datasets, and the columns of a table of your own.\n\n"
    "tacit data lists the datasets; tacit data NAME is short for tacit data show NAME.",
)


@data_app.command()
def show(
    name: str | None = typer.Argument(
        None, help="Dataset to fetch, verify and describe. Without it, all are listed."
    ),
    as_json: bool = JSON,
) -> None:
    """List the named datasets, or fetch, verify and describe one.

    Example: tacit data fashion-mnist
    """
    from rich.console import Console
    from rich.table import Table

    from tacit.data.catalogue import available
    from tacit.data.loading import load

    if name is not None:
        train, test = load(name)
        facts = {
            "name": train.name,
            "train_records": train.public_size,
            "test_records": test.public_size,
            "shape": "×".join(map(str, train.shape)),
            "classes": train.num_classes,
            "notes": list(train.notes) if as_json else "\n".join(train.notes),
        }
        print_facts(facts, as_json, "dataset")
    elif as_json:
        print_json({"datasets": list(available())})
    else:
        table = Table("dataset")
        for dataset in available():
            table.add_row(dataset)
        Console().print(table)
        typer.echo("use one: tacit train --dataset NAME, or tacit.load(NAME) in Python")


@data_app.command()
def describe(
    file: Path = typer.Argument(..., help="A table: .csv, .tsv or .parquet."),
    target: str | None = typer.Option(
        None, help="Column to predict, or several of true and false with commas."
    ),
    as_json: bool = JSON,
) -> None:
    """Write a first schema of a table, for you to confirm and complete.

    It is made from the names and types of the columns. No range, category, count or value of the
    table is in it: fill in what is public. What is not public stays "release", and tacit train
    releases it with noise, which is charged.

    Example: tacit data describe patients.csv --target outcome > schema.toml
    """
    from tacit.data.table_description import commented, to_predict
    from tacit.data.table_description import describe as describe_table

    schema = describe_table(file)
    if target is not None:
        schema = to_predict(schema, schema.named_in(target))
    if as_json:
        print_json(schema.to_dict())
    else:
        typer.echo(commented(schema), nl=False)
