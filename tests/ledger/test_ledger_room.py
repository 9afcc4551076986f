"""`Ledger.require_room`: a run that it lets begin takes all of its steps, any other would not."""

from __future__ import annotations

import dp_accounting
import pytest
import torch
from torch import nn

import tacit
from tacit.accounting import Plan
from tacit.errors import BudgetExceeded
from tacit.sampling import Poisson


def steps_taken(ledger: tacit.Ledger, multiplier: float, steps: int, epsilon: float) -> int:
    records = tacit.Records(torch.randn(20, 2), torch.zeros(20).long(), public_size=20)
    model = nn.Linear(2, 2)
    return (
        tacit.Trainer(
            model,
            tacit.losses.CrossEntropy(),
            tacit.PerSampleClip(1.0),
            tacit.PoissonSampler(records, 1.0, steps),
            torch.optim.SGD(model.parameters(), lr=0.1),
            tacit.Budget(epsilon, 1e-5),
            noise=tacit.Noise(multiplier),
            ledger=ledger,
            callbacks=[],
        )
        .fit()
        .steps
    )


def has_room(ledger: tacit.Ledger, multiplier: float, steps: int, epsilon: float) -> bool:
    relation = ledger.budget.relation
    plan = Plan(Poisson(1.0), multiplier, relation, steps)
    try:
        ledger.require_room(plan, tacit.Budget(epsilon, 1e-5))
    except BudgetExceeded:
        return False
    return True


@pytest.mark.parametrize("before", [(), (10.0,)])
@pytest.mark.parametrize("multiplier", [3.0, 8.0, 14.0, 30.0])
def test_it_says_what_will_happen(before: tuple[float, ...], multiplier: float) -> None:
    ledger = tacit.Ledger(None, tacit.Budget(3.0, 1e-5))
    for z in before:
        steps_taken(ledger, z, 10, 3.0)
    number = len(ledger.statement().runs)
    room = has_room(ledger, multiplier, 10, 3.0)
    assert len(ledger.statement().runs) == number  # nothing was begun or charged
    taken = steps_taken(ledger, multiplier, 10, 3.0)
    assert (taken == 10) == room


def test_the_runs_own_budget_counts_and_so_does_what_comes_before() -> None:
    ledger = tacit.Ledger(None, tacit.Budget(3.0, 1e-5))
    assert has_room(ledger, 6.0, 10, 3.0)
    assert not has_room(ledger, 6.0, 10, 1.0)
    first = (dp_accounting.GaussianDpEvent(2.0),)
    plan = Plan(Poisson(1.0), 6.0, ledger.budget.relation, 10, prelude=first)
    with pytest.raises(BudgetExceeded, match="do not fit into what is left"):
        ledger.require_room(plan)
    with pytest.raises(ValueError, match="no number of steps"):
        ledger.require_room(Plan(Poisson(1.0), 6.0, ledger.budget.relation))
