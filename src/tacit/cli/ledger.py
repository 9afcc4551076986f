"""`tacit ledger`: what has been spent on a dataset, and room for more runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tacit.accounting.ledger import Ledger
from tacit.accounting.ledger_statement import Statement, read_statement
from tacit.budget import Budget, Relation
from tacit.cli import accounting_options as options
from tacit.cli.accounting_options import RelationName
from tacit.report.run_folder import to_json

ledger = typer.Typer(
    help="Show or make a ledger. Example: tacit ledger show runs/digits/ledger.sqlite",
    no_args_is_help=True,
)


@ledger.command()
def show(
    file: Path = typer.Argument(..., help="The ledger's file."), as_json: bool = options.JSON
) -> None:
    """Every run that the ledger holds, and their total. The file is only read.

    Example: tacit ledger show runs/digits/ledger.sqlite --json
    """
    if not file.is_file():
        raise ValueError(f"there is no ledger at {file}; make one with: tacit ledger create {file}")
    statement = read_statement(file)
    if as_json:
        typer.echo(to_json(facts_of(statement)))
    else:
        _print(statement)


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
        "runs": [
            {
                "name": run.name,
                "started": run.started,
                "charged_steps": run.steps,
                "step_limit": run.step_limit,
                "epsilon": run.epsilon,
                "epsilon_planned": run.epsilon_planned,
                "exclusive": run.exclusive,
                "sampling": run.plan.scheme.describe(),
                "noise_multiplier": run.plan.noise_multiplier,
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
            f"{run.steps}/{run.step_limit}",
            f"{run.epsilon:.4g}",
            f"{run.epsilon_planned:.4g}",
            f"{run.plan.noise_multiplier:.4g}",
            run.plan.scheme.describe(),
        )
    console = Console()
    console.print(table)
    budget = statement.budget
    console.print(
        f"guaranteed ε {statement.epsilon:.4g}, charged so far {statement.epsilon_charged:.4g} of "
        f"{budget.epsilon:g} (by {statement.method}), δ {budget.delta:g}, {budget.relation}",
        highlight=False,
    )
    if any(run.exclusive for run in statement.runs):
        console.print("a run took the whole budget: no other run can be let in", highlight=False)
