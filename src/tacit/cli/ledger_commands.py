"""`tacit ledger`: what has been spent on a dataset, and room for more runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.budget import Budget, Relation
from tacit.cli.accounting_commands import DELTA
from tacit.cli.console import JSON, print_json

if TYPE_CHECKING:
    from tacit.ledger import Statement

ledger_app = typer.Typer(
    help="Show, check or make a ledger. Example: tacit ledger show runs/x/ledger.sqlite",
    no_args_is_help=True,
)
FILE = typer.Argument(..., help="File of the ledger.")


@ledger_app.command()
def show(file: Path = FILE, as_json: bool = JSON) -> None:
    """Show every run that the ledger holds, and their total. The file is only read.

    The head that is printed last changes with each charge. Keep it elsewhere:
    `tacit ledger verify` then detects a ledger that was rewritten, or replaced
    by an older copy.

    Example: tacit ledger show runs/x/ledger.sqlite --json
    """
    from tacit.ledger.statement import read_statement

    _require_file(file)
    _print(read_statement(file), as_json)


@ledger_app.command()
def verify(
    file: Path = FILE,
    head: str | None = typer.Option(None, help="A head that the ledger had, as show prints it."),
    anchor: Path | None = typer.Option(None, help="The file that follows the ledger's head."),
    as_json: bool = JSON,
) -> None:
    """Check that no row of the ledger was changed, and that it continues a head it once had.

    The file is only read. Without --head or --anchor, it cannot tell an older
    copy of the whole file from the newest.

    Example: tacit ledger verify runs/x/ledger.sqlite --head 6b1f…
    """
    from tacit.ledger.statement import verify_file

    _require_file(file)
    statement = verify_file(file, head, anchor)
    if as_json:
        print_json({"verified": True, **statement_facts(statement)})
        return
    against = [name for name, given in (("head", head), ("anchor", anchor)) if given is not None]
    continues = f", and it continues the {' and the '.join(against)}" if against else ""
    typer.echo(f"every row is as it was written{continues}\nhead {statement.head}")


@ledger_app.command()
def anchor(
    file: Path = FILE,
    target: Path = typer.Argument(..., help="File to write; best on another disk or machine."),
) -> None:
    """Write the ledger's head to a file, for `verify --anchor` and tacit.Ledger(anchor=...).

    Example: tacit ledger anchor data.sqlite /backup/data.anchor.json
    """
    from tacit.ledger import Ledger
    from tacit.ledger.statement import verify_file

    _require_file(file)
    if target.exists():
        verify_file(file, anchor=target)
    with Ledger(file) as book:
        book.write_anchor(target)
        typer.echo(f"head {book.head} written to {target}")


@ledger_app.command()
def create(
    file: Path = FILE,
    epsilon: float = typer.Option(..., help="ε that all runs together may spend."),
    delta: float = DELTA,
    relation: Relation = typer.Option(Relation.ADD_OR_REMOVE_ONE, help="Neighbouring relation."),
    as_json: bool = JSON,
) -> None:
    """Make a ledger for several runs over the same data.

    Example: tacit ledger create mnist.sqlite --epsilon 8 --delta 1e-5
    """
    from tacit.ledger import Ledger

    if file.exists():
        raise ValueError(f"{file} exists already; a ledger's budget is fixed when it is made")
    with Ledger(file, Budget(epsilon, delta, relation)) as book:
        _print(book.statement(), as_json)


def _require_file(file: Path) -> None:
    if not file.exists():
        raise ValueError(f"there is no ledger at {file}; make one with: tacit ledger create {file}")


def statement_facts(statement: Statement) -> dict[str, Any]:
    return {
        "epsilon": statement.epsilon,
        "epsilon_charged": statement.epsilon_charged,
        "method": statement.method,
        "budget_epsilon": statement.budget.epsilon,
        "delta": statement.budget.delta,
        "relation": statement.budget.relation.value,
        "head": statement.head,
        "runs": [
            {
                "name": run.name,
                "started": run.started,
                "charged_steps": run.steps,
                "step_limit": run.step_limit,
                "epsilon": run.epsilon,
                "epsilon_planned": run.epsilon_planned,
                "exclusive": run.exclusive,
                "sampling": run.plan.scheme.describe() if run.plan else run.note,
                "noise_multiplier": run.plan.noise_multiplier if run.plan else None,
            }
            for run in statement.runs
        ],
    }


def _print(statement: Statement, as_json: bool) -> None:
    if as_json:
        print_json(statement_facts(statement))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "started", "steps", "ε charged", "ε planned", "noise", "sampling")
    for run in statement.runs:
        table.add_row(
            run.name,
            run.started[:16].replace("T", " "),
            f"{run.steps}/{'?' if run.step_limit is None else run.step_limit}",
            f"{run.epsilon:.4g}",
            f"{run.epsilon_planned:.4g}",
            f"{run.plan.noise_multiplier:.4g}" if run.plan else "?",
            run.plan.scheme.describe() if run.plan else run.note,
        )
    console = Console()
    console.print(table)
    budget = statement.budget
    console.print(
        f"guaranteed ε {statement.epsilon:.4g}, charged so far {statement.epsilon_charged:.4g} of "
        f"{budget.epsilon:g} ({statement.method}), δ {budget.delta:g}, {budget.relation}",
        highlight=False,
    )
    console.print(f"head {statement.head}", highlight=False, soft_wrap=True)
    if any(run.exclusive for run in statement.runs):
        console.print("one run took the whole budget: no other run can be added", highlight=False)
