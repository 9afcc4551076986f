"""The command line: `tacit train` and the commands around it.

`settings` declares the options of `tacit train` once, and `schema` makes the command line, files of
settings and checks from them. The `build_*` modules turn settings into objects, `train_command`
runs them, and the other `*_commands` print what the library computes. Modules that are imported
here import torch, SciPy and matplotlib inside their functions, so that `--help` is fast.
"""

from __future__ import annotations

import sqlite3
import sys

import typer

import tacit
from tacit.cli.accounting_commands import epsilon, noise, trade_off
from tacit.cli.console import PLUGIN, import_plugin
from tacit.cli.data_commands import data_app
from tacit.cli.show_commands import certify, inspect, ledger_app
from tacit.cli.train_command import train_command
from tacit.errors import TacitError

__all__ = ["app", "main"]

app = typer.Typer(
    name="tacit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="train")(train_command)
app.command()(epsilon)
app.command()(noise)
app.command(name="trade-off")(trade_off)
app.add_typer(ledger_app, name="ledger")
app.add_typer(data_app, name="data")
app.command()(certify)
app.command()(inspect)


def _print_release(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tacit {tacit.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_print_release, is_eager=True, help="Show the version."
    ),
    plugin: list[str] = PLUGIN,
) -> None:
    """Train PyTorch models with differential privacy, and account for it."""
    for name in plugin:
        import_plugin(name)


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error, and exit code 1."""
    try:
        app()
    except (TacitError, ValueError, OSError) as error:
        message = str(error)
    except sqlite3.Error as error:
        message = f"the ledger could not be read or written: {error}"
    else:
        return
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    sys.exit(1)
