"""`tacit noise`: the noise that a budget asks for."""

from __future__ import annotations

import typer

from tacit.accounting.accountant import calibrate, no_privacy_note
from tacit.accounting.accountant import epsilon as epsilon_by_pld
from tacit.budget import Budget
from tacit.cli import accounting_options as options
from tacit.cli.accounting_options import AccountedSampling, RelationName
from tacit.cli.output import show


def noise(
    epsilon: float = typer.Option(..., help="ε to stay within."),
    delta: float = options.DELTA,
    sampling_rate: float | None = options.RATE,
    steps: int = options.STEPS,
    sampling: AccountedSampling = options.ACCOUNTED_SAMPLING,
    population: int | None = options.POPULATION,
    batch_size: int | None = options.BATCH,
    relation: RelationName | None = options.RELATION,
    as_json: bool = options.JSON,
) -> None:
    """The least noise multiplier whose ε, by PLD, is within the budget.

    Example: tacit noise --epsilon 3 --delta 1e-5 --sampling-rate 0.02048 --steps 1465
    """
    if steps < 1:
        raise ValueError(f"--steps is {steps}, which asks for no noise; give at least 1")
    scheme = options.scheme_from(sampling, sampling_rate, population, batch_size)
    budget = Budget(epsilon, delta, options.relation_from(relation, sampling))
    unit = options.unit_from(sampling)
    multiplier = calibrate(budget, scheme, steps, unit=unit)
    reached = epsilon_by_pld(
        multiplier, scheme, steps, delta=delta, relation=budget.relation, unit=unit
    )
    facts = {
        "noise_multiplier": multiplier,
        "epsilon": reached,
        "delta": delta,
        "relation": budget.relation.value,
        "sampling": scheme.describe(),
        "steps": steps,
    }
    note = no_privacy_note(reached, delta)
    if note is not None:
        facts["note"] = note
    show(facts, as_json, "noise for a budget")
