"""What a run of `tacit train` says of its own shortcomings."""

from __future__ import annotations

from tacit.training.run import Run

INITIAL = "the weights are the initial ones"


def delta_note(delta: float, num_records: int) -> list[str]:
    """δ ≥ 1/N allows what nobody would call private; N is public. Empty where δ is below that."""
    if delta * num_records < 1:
        return []
    return [
        f"δ = {delta:g} is not below 1/N for N = {num_records} records: to publish each record "
        "whole with probability δ would keep this promise too, and would show one record or more "
        "in expectation; give a --delta well below 1/N"
    ]


def no_step_note(run: Run, charged_before: int, limit: int) -> list[str]:
    """Why a run took no step, or nothing if it took one.

    `charged_before` and `limit` are the run's events on its ledger before it went on.
    """
    if run.steps > 0:
        return []
    planned = run.plan.steps
    if planned == 0:
        why = "--steps is 0"
    elif run.stopped != "budget":
        why = f"the run was ended before its first ({run.stopped})"
    elif limit == 0:
        why = (
            f"one step with noise multiplier {run.plan.noise_multiplier:g} would pass the budget, "
            f"epsilon {run.budget.epsilon:g} at delta {run.budget.delta:g}, or that of its ledger"
        )
    elif charged_before < limit:
        why = "the other runs of the ledger leave no budget for one"
    elif planned is not None and charged_before >= run.plan.scheme.num_events(planned):
        return [
            "no step was taken: the run of this name was complete on its ledger already; "
            f"{INITIAL}, not those that it had reached"
        ]
    else:
        why = "the run of this name had spent its budget on the ledger already"
    return [f"no step was taken: {why}; {INITIAL}"]
