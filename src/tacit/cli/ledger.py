"""`tacit ledger`: what has been spent on a dataset, and room for more runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tacit.budget import Budget, Relation
from tacit.cli import accounting_options as options
from tacit.cli.accounting_options import RelationName
from tacit.ledger import Ledger
from tacit.ledger.statement import Statement, read_statement, verify_file
from tacit.report.run_folder import to_json

ledger = typer.Typer(
    help="Show, check or make a ledger. Example: tacit ledger show runs/x/ledger.sqlite",
    no_args_is_help=True,
)


@ledger.command()
def show(
    file: Path = typer.Argument(..., help="The ledger's file."), as_json: bool = options.JSON
) -> None:
    """Every run that the ledger holds, and their total. The file is only read.

    The head that is printed last changes with each charge. Keep it elsewhere: `tacit ledger verify`
    then finds a ledger that was rewritten, or replaced by an older copy.

    Example: tacit ledger show runs/x/ledger.sqlite --json
    """
    _require_file(file)
    statement = read_statement(file)
    if as_json:
        typer.echo(to_json(facts_of(statement)))
    else:
        _print(statement)


@ledger.command()
def verify(
    file: Path = typer.Argument(..., help="The ledger's file."),
    head: str | None = typer.Option(None, help="A head that the ledger had, as show prints it."),
    anchor: Path | None = typer.Option(None, help="The file that follows the ledger's head."),
    as_json: bool = options.JSON,
) -> None:
    """Check that no row of the ledger was changed, and that it continues a head it once had.

    The file is only read. Without --head or --anchor, an older copy that was put back whole passes.

    Example: tacit ledger verify runs/x/ledger.sqlite --head 6b1f…
    """
    _require_file(file)
    statement = verify_file(file, head, anchor)
    if as_json:
        typer.echo(to_json({"verified": True, **facts_of(statement)}))
        return
    against = [name for name, given in (("head", head), ("anchor", anchor)) if given is not None]
    told = f", and it continues the {' and the '.join(against)}" if against else ""
    typer.echo(f"every row is as it was written{told}\nhead {statement.head}")


@ledger.command()
def anchor(
    file: Path = typer.Argument(..., help="The ledger's file."),
    target: Path = typer.Argument(..., help="The file to write; best on another disk or machine."),
) -> None:
    """Write the ledger's head to a file, for `verify --anchor` and tacit.Ledger(anchor=...).

    Example: tacit ledger anchor data.sqlite /backup/data.anchor.json
    """
    _require_file(file)
    if target.exists():
        verify_file(file, anchor=target)
    with Ledger(file) as book:
        book.write_anchor(target)
        typer.echo(f"head {book.head} written to {target}")


def _require_file(file: Path) -> None:
    if not file.exists():
        raise ValueError(f"there is no ledger at {file}; make one with: tacit ledger create {file}")


@ledger.command()
def create(
    file: Path = typer.Argument(..., help="The ledger's file."),
    epsilon: float = typer.Option(..., help="ε that all runs together may spend."),
    delta: float = options.DELTA,
    relation: RelationName = typer.Option(RelationName.ADD_OR_REMOVE_ONE, help="Neighbours."),
    as_json: bool = options.JSON,
) -> None:
    """Make a ledger for several runs over the same data.

    Example: tacit ledger create mnist.sqlite --epsilon 8 --delta 1e-5
    """
    if file.exists():
        raise ValueError(f"{file} is there already; a ledger's budget is fixed when it is made")
    with Ledger(file, Budget(epsilon, delta, Relation(relation.value))) as book:
        statement = book.statement()
    if as_json:
        typer.echo(to_json(facts_of(statement)))
    else:
        _print(statement)


def facts_of(statement: Statement) -> dict[str, Any]:
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


def _print(statement: Statement) -> None:
    table = Table("run", "started", "steps", "ε charged", "ε planned", "noise", "sampling")
    for run in statement.runs:
        table.add_row(
            run.name,
            run.started,
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
        f"{budget.epsilon:g} (by {statement.method}), δ {budget.delta:g}, {budget.relation}",
        highlight=False,
    )
    console.print(f"head {statement.head}", highlight=False, soft_wrap=True)
    if any(run.exclusive for run in statement.runs):
        console.print("a run took the whole budget: no other run can be let in", highlight=False)
