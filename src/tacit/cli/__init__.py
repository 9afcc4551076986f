"""The command line: one file a command."""

from __future__ import annotations

import sqlite3
import sys

import typer

import tacit
from tacit.cli.certify import certify
from tacit.cli.data import data
from tacit.cli.epsilon import epsilon
from tacit.cli.inspect import inspect
from tacit.cli.ledger import ledger
from tacit.cli.noise import noise
from tacit.cli.plugins import PLUGIN, import_plugin
from tacit.cli.trade_off import trade_off
from tacit.cli.train import train
from tacit.errors import TacitError

app = typer.Typer(
    name="tacit",
    help="Train PyTorch models with differential privacy, and account for it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(epsilon)
app.command()(noise)
app.command(name="trade-off")(trade_off)
app.add_typer(ledger, name="ledger")
app.command()(data)
app.command()(certify)
app.command()(inspect)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tacit {tacit.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
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
        _refuse(str(error))
    except sqlite3.Error as error:
        _refuse(f"the ledger could not be read or written: {error}")


def _refuse(message: str) -> None:
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    sys.exit(1)
