"""The command line: `tacit train`, `tacit finetune` and the commands around them.

`settings`, `finetune_settings` and `run_settings`, which the two share, declare each option once,
and `schema` makes the command line, files of settings and checks from them. The `build_*` modules
turn settings into objects, `train_command` and `finetune_command` run them, `launch` starts a run
in one process or on several ranks and resumes it, and the other `*_commands` print what the library
computes. Modules that are imported
here import torch, SciPy and matplotlib inside their functions, so that `--help` is fast.
"""

from __future__ import annotations

import dis
import os
import sqlite3
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import typer

import tacit
from tacit.cli.accounting_commands import epsilon, noise, trade_off
from tacit.cli.audit_commands import attack, audit
from tacit.cli.console import PLUGIN, import_plugin, is_first_rank, tells_error
from tacit.cli.data_commands import data_app
from tacit.cli.doctor_command import doctor
from tacit.cli.finetune_command import finetune_command
from tacit.cli.model_commands import export, predict
from tacit.cli.report_commands import compare, report, statement, verify
from tacit.cli.search_command import search_command
from tacit.cli.show_commands import certify, inspect, ledger_app
from tacit.cli.train_command import train_command
from tacit.errors import TacitError, naming_options

__all__ = ["app", "main"]

# Exit codes. 130 is for Ctrl-C, as in any shell.
MISTAKE = 2
OURS = 1
OTHERS_WAIT = 1.0  # seconds

app = typer.Typer(
    name="tacit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="train")(train_command)
app.command(name="search")(search_command)
app.command(name="finetune")(finetune_command)
app.command()(predict)
app.command()(export)
app.command()(epsilon)
app.command()(noise)
app.command(name="trade-off")(trade_off)
app.add_typer(ledger_app, name="ledger")
app.add_typer(data_app, name="data")
app.command()(audit)
app.command()(attack)
app.command()(certify)
app.command()(inspect)
app.command()(doctor)
app.command()(report)
app.command()(compare)
app.command()(statement)
app.command()(verify)


def _print_release(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tacit {tacit.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_print_release, is_eager=True, help="Show the version."
    ),
    plugin: list[str] = PLUGIN,
) -> None:
    """Train PyTorch models with differential privacy, and account for it."""
    context.with_resource(naming_options())
    for name in plugin:
        import_plugin(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, by default with the arguments of the process, and exit.

    The exit code is 0 for success, 2 for a user's mistake (a bad option, a file that cannot be
    used, a run that the budget refuses), 1 for an error of ours, and 130 for Ctrl-C. Either error
    is a short message on standard error; TACIT_DEBUG=1 shows the traceback too.
    """
    warnings.showwarning = _show_warning
    try:
        app(arguments)
    except Exception as error:
        mistake = _is_mistake(error)
        message = _said(error) if mistake else _report(error)
        if os.environ.get("TACIT_DEBUG", "") not in ("", "0"):
            traceback.print_exc()
    else:
        return
    if tells_error():
        typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    else:
        time.sleep(OTHERS_WAIT)  # another rank says why, before torchrun ends all of them
    sys.exit(MISTAKE if mistake else OURS)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as a line of its own, without the place in the sources that gave it."""
    if is_first_rank():
        typer.secho(f"warning: {message}", fg=typer.colors.YELLOW, err=True)


def _is_mistake(error: Exception) -> bool:
    """Whether the user can do something about it.

    It is a TacitError, tells of files and disks, or is a ValueError that Tacit raises on purpose,
    by a `raise` of its own. A ValueError from inside of another library, or from an expression of
    ours such as int("x"), is one that Tacit should have foreseen.
    """
    if isinstance(error, TacitError | OSError | sqlite3.Error):
        return True
    if type(error).__name__ == "OutOfMemoryError":  # of torch, which is not imported here
        return True
    trace = error.__traceback__
    if trace is None or not isinstance(error, ValueError | TypeError | ImportError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    on_purpose = code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return on_purpose and Path(tacit.__file__).parent in Path(code.co_filename).parents


def _said(error: Exception) -> str:
    if isinstance(error, sqlite3.Error):
        return f"the ledger could not be read or written: {error}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be used: {error.strerror}; check the path and its rights"
    if type(error).__name__ == "OutOfMemoryError":
        first = str(error).splitlines()[0]
        return f"{first}; give a smaller --max-physical-batch, or --micro-batch of tacit finetune"
    return str(error)


def _report(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return (
        f"an error of Tacit itself, {type(error).__name__}: {lines[0]}\nTACIT_DEBUG=1 shows where; "
        "please report that, with the output of `tacit doctor --json`"
    )
