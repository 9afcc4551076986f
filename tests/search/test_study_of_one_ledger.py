"""What chooses the settings was charged to the ledger of the search, and to no other."""

from __future__ import annotations

import pytest
import torch

import tacit
from tacit.budget import Relation
from tacit.search import TrialSearch, audit_search, simulate, synthetic_records
from tacit.search.scores import split_for_scores
from tests.search.small_search import (
    BUDGET,
    RATE,
    SPACE,
    STEPS,
    build,
    small_plan,
    some_records,
)

optuna = pytest.importorskip("optuna")


def search_on(study, ledger=None) -> TrialSearch:
    return TrialSearch(build, SPACE, some_records(), small_plan(), study=study, ledger=ledger)


def test_a_study_with_trials_of_another_ledger_is_refused(tmp_path) -> None:
    study = optuna.create_study(direction="maximize")
    search_on(study).run_trials(1)
    other = search_on(study, str(tmp_path / "other.sqlite"))
    with pytest.raises(ValueError, match="has not charged"):
        other.run_trials(1)
    with pytest.raises(ValueError, match="has not charged"):
        other.best()
    assert not audit_search(BUDGET.epsilon, study, tmp_path / "other.sqlite").is_charged


def test_a_trial_that_was_added_to_the_study_later_is_refused() -> None:
    study = optuna.create_study(direction="maximize")
    search = search_on(study)
    search.run_trials(1)
    copied = study.trials[0]
    study.add_trial(copied)  # with the claim of the first
    with pytest.raises(ValueError, match="has not charged"):
        search.best()


def test_a_simulation_begins_with_an_empty_study() -> None:
    study = optuna.create_study(direction="maximize")
    study.optimize(lambda trial: trial.suggest_float("lr", 0.1, 1), n_trials=1)
    records = some_records()
    public = synthetic_records(records.shape, 2, 200)
    with pytest.raises(ValueError, match="give an empty study"):
        simulate(
            build, SPACE, records, public, BUDGET, rate=RATE, steps=STEPS, trials=1, study=study
        )


def test_records_in_bfloat16_are_split() -> None:
    inputs = torch.randn(400, 3).bfloat16()
    data = tacit.Records(inputs, torch.arange(400) % 2, num_classes=2, public_size=400)
    trained, scored = split_for_scores(data, 0.25, Relation.ADD_OR_REMOVE_ONE)
    assert len(trained) + len(scored) == 400
    assert 50 < len(scored) < 150
