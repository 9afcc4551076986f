"""A search by cheap trials: what it costs, what its ledger holds, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys

import dp_accounting as dpa
import pytest
import torch
from scipy.stats import norm

import tacit
from tacit.budget import Relation
from tacit.errors import PlanChanged, TacitError
from tacit.ledger import read_statement
from tacit.randomness import Randomness
from tacit.search import BoundedLoss, RightAnswers, TrialSearch, audit_search, plan_trials
from tacit.search.cheap_trials import quiet_study
from tacit.search.scores import noisy_score, score_sum, split_for_scores
from tests.search.small_search import (
    BUDGET,
    SPACE,
    TRIALS,
    build,
    small_plan,
    small_search,
    some_records,
)  # fmt: skip

optuna = pytest.importorskip("optuna")


# ---- what it costs -------------------------------------------------------------------------------


def test_fifty_trials_and_a_run_cost_a_third_more_than_the_run_alone() -> None:
    plan = plan_trials(tacit.Budget(3.0, 1e-5), rate=0.03, steps=1000, trials=50)
    alone = tacit.epsilon(plan.noise_multiplier, tacit.sampling.Poisson(0.03), 1000, delta=1e-5)
    assert plan.epsilon_of_final_run == alone
    assert 2.9 < plan.epsilon <= 3.0
    assert plan.epsilon / alone <= 1.3
    assert plan.epsilon_of_full_trials > 5 * plan.epsilon


def test_the_cost_is_that_of_every_release_counted_by_dp_accounting() -> None:
    plan = plan_trials(tacit.Budget(3.0, 1e-5), rate=0.1, steps=100, trials=20, trial_steps=7)
    accountant = dpa.pld.PLDAccountant(value_discretization_interval=1e-3)
    step = dpa.GaussianDpEvent(plan.trial.noise_multiplier)
    accountant.compose(dpa.SelfComposedDpEvent(step, 20 * 7))
    final = dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(plan.noise_multiplier))
    accountant.compose(dpa.SelfComposedDpEvent(final, 100))
    assert plan.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


def test_a_trial_and_its_score_are_one_gaussian() -> None:
    plan = small_plan()
    assert plan.trial.epsilon(plan.trial_steps, 1e-4) == pytest.approx(
        tacit.epsilon(plan.trial_noise, tacit.sampling.Poisson(1.0), 1, delta=1e-4)
    )


def test_a_run_is_charged_for_all_trials_before_the_first(tmp_path) -> None:
    search = small_search(ledger=tmp_path / "ledger.sqlite")
    assert search.trials_left() == TRIALS
    statement = read_statement(tmp_path / "ledger.sqlite")
    assert statement.epsilon == search.plan.epsilon
    assert statement.epsilon_charged == search.plan.epsilon_of_trials


def test_what_is_printed_is_what_the_ledger_holds(tmp_path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    search = small_search(ledger=ledger)
    result = search.run()
    assert result.run.epsilon == read_statement(ledger).epsilon == search.plan.epsilon
    assert result.run.epsilon <= BUDGET.epsilon
    facts = result.run.facts()["search"]
    assert facts["trials"] == TRIALS
    assert facts["epsilon_uncharged"] < facts["epsilon"] == result.run.epsilon
    assert "epsilon, had the search not been charged" in result.run.summary()
    assert audit_search(result.run.epsilon, search.study, ledger).is_charged


# ---- one record ----------------------------------------------------------------------------------


def score_of_one(outputs, targets, loss):
    return torch.full((len(targets),), 7.0)  # far above 1: it is cut


@pytest.mark.parametrize("relation", Relation)
def test_one_record_changes_one_side_of_the_split_by_itself(relation) -> None:
    records = some_records(60)
    sides = split_for_scores(records, 0.3, relation)
    for index in range(0, 60, 7):
        if relation is Relation.REPLACE_ONE:
            neighbour = records.replaced(index, torch.full((4,), 9.0), torch.tensor(1))
        else:
            less = records.without(index)  # as from a file, whose rows are numbered anew
            neighbour = tacit.Records(less.inputs, less.targets, 2, public_size=60)
        others = split_for_scores(neighbour, 0.3, relation)
        changed = [
            set(map(tuple, torch.cat([a.inputs, a.targets[:, None]], 1).tolist()))
            ^ set(map(tuple, torch.cat([b.inputs, b.targets[:, None]], 1).tolist()))
            for a, b in zip(sides, others, strict=True)
        ]
        assert sorted(map(len, changed)) == [0, 2 if relation is Relation.REPLACE_ONE else 1]
    assert [side.public_size for side in sides] == [42, 18]


def test_one_record_moves_a_score_by_one_at_most() -> None:
    model, loss, records = torch.nn.Linear(4, 2), tacit.losses.CrossEntropy(), some_records(50)
    scores = RightAnswers(), BoundedLoss(2.0), score_of_one
    for score in scores:
        whole = score_sum(model, records, loss, score)
        for index in range(50):
            assert abs(whole - score_sum(model, records.without(index), loss, score)) <= 1
            worst = records.replaced(index, torch.full((4,), math.nan), torch.tensor(0))
            assert abs(whole - score_sum(model, worst, loss, score)) <= 1


def test_a_score_has_the_noise_that_is_charged() -> None:
    model, loss, records = torch.nn.Linear(4, 2), tacit.losses.CrossEntropy(), some_records(50)
    exact = score_sum(model, records, loss, RightAnswers())
    found = torch.tensor([
        noisy_score(model, records, loss, RightAnswers(), 8.0, Randomness().stream("test", i)) * 50
        for i in range(400)
    ])  # fmt: skip
    assert abs(float(found.mean()) - exact) < 5 * 8 / 20
    assert float(found.std()) == pytest.approx(8, rel=0.15)


def test_the_best_attack_on_a_whole_search_stays_below_its_epsilon() -> None:
    """Whoever knows all but one record compares likelihoods of all that was released.

    Each trial is reduced to the projection in which the record's own gradient lies, the most
    that anybody can know; the final run is left out, so that the trials' own ε is attacked.
    """
    plan = plan_trials(tacit.Budget(3.0, 1e-2), rate=0.5, steps=10, trials=10)
    epsilon = plan.epsilon_of_trials
    # T trials of n full batches: n projections at multiplier z·√n each, all moved by 1.
    per_step = plan.trial.noise_multiplier
    separation = math.sqrt(10 * plan.trial_steps) / per_step
    thresholds = torch.linspace(-4, 8, 400).tolist()
    gaps = [
        norm.sf(t - separation) - math.exp(epsilon) * norm.sf(t) for t in thresholds
    ]  # the exact power of the likelihood-ratio test
    assert max(gaps) <= 1e-2 * (1 + 1e-3)
    assert max(gaps) > 0.9e-2  # and it is nearly reached: nothing is charged twice


# ---- crashes, kills, processes -------------------------------------------------------------------


def test_crashed_and_pruned_trials_are_charged(tmp_path) -> None:
    calls = []

    def fragile(settings, stage):
        calls.append(stage.is_final)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        if len(calls) == 4:
            raise optuna.TrialPruned
        return build(settings, stage)

    ledger = tmp_path / "ledger.sqlite"
    search = small_search(fragile, ledger=ledger)
    result = search.run()
    (charge,) = read_statement(ledger).runs
    assert len(charge.claims) == TRIALS
    assert result.facts["states"] == {"complete": 2, "fail": 1, "pruned": 1}
    assert result.run.epsilon == search.plan.epsilon
    failed = [t for t in search.study.trials if t.state.name == "FAIL"]
    assert failed[0].user_attrs["error"] == "RuntimeError"


def test_trials_that_all_fail_end_the_search() -> None:
    def broken(settings, stage):
        if calls:
            raise RuntimeError("no")
        calls.append(1)
        return build(settings, stage)

    calls = []
    with pytest.raises(TacitError, match=r"all of the first 3 trials failed, and each was charged"):
        small_search(broken).run()


def test_a_mistake_is_found_before_anything_is_charged(tmp_path) -> None:
    def mistaken(settings, stage):
        raise ValueError("a typo")

    with pytest.raises(ValueError, match="a typo"):
        small_search(mistaken, ledger=tmp_path / "ledger.sqlite").run()
    assert not read_statement(tmp_path / "ledger.sqlite").runs


KILLED = """
import os, signal, sys
from tests.search.small_search import build, small_search
from tacit.search.cheap_trials import quiet_study
calls = []
def killed(settings, stage):
    calls.append(1)
    if len(calls) == 4:  # a rehearsal and two trials came before
        os.kill(os.getpid(), signal.SIGKILL)
    return build(settings, stage)
study = quiet_study("sqlite:///" + sys.argv[2], "search")
small_search(killed, ledger=sys.argv[1], study=study).run()
"""


def test_a_search_that_is_killed_goes_on_without_the_trial_that_it_lost(tmp_path) -> None:
    ledger, storage = tmp_path / "ledger.sqlite", tmp_path / "study.sqlite3"
    command = [sys.executable, "-c", KILLED, str(ledger), str(storage)]
    done = subprocess.run(command, capture_output=True, check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    (charge,) = read_statement(ledger).runs
    assert len(charge.claims) == 3
    study = quiet_study(f"sqlite:///{storage}", "search")
    search = small_search(ledger=ledger, study=study)
    assert search.trials_left() == TRIALS - 3
    result = search.run()
    (charge,) = read_statement(ledger).runs
    assert len(charge.claims) == TRIALS
    assert result.run.epsilon == search.plan.epsilon
    assert result.facts["states"] == {"complete": 3, "running": 1}
    assert audit_search(result.run.epsilon, study, ledger).is_charged


def test_two_workers_share_the_trials(tmp_path) -> None:
    ledger, storage = tmp_path / "ledger.sqlite", f"sqlite:///{tmp_path / 'study.sqlite3'}"
    one, other = (
        small_search(ledger=ledger, study=quiet_study(storage, "search")) for _ in range(2)
    )
    assert one.run_trials(2) == 2
    assert other.run_trials() == TRIALS - 2
    assert one.run_trials() == other.run_trials() == 0
    claims = [trial.user_attrs["claim"] for trial in one.study.trials]
    assert len(set(claims)) == TRIALS
    one.finish()
    with pytest.raises(tacit.errors.BudgetExceeded):
        other.ledger.begin(other.plan.plan, name="again", budget=BUDGET)


# ---- what is refused -----------------------------------------------------------------------------


def test_a_trainer_with_another_plan_is_refused() -> None:
    def noisier(settings, stage):
        steps = dataclasses.replace(stage.plan, steps=stage.steps + 1)
        return build(settings, dataclasses.replace(stage, plan=steps))

    with pytest.raises(PlanChanged, match="the search charged for"):
        small_search(noisier).run()


def test_a_trial_may_not_train_on_the_records_that_it_is_scored_on() -> None:
    records = some_records()

    def everyone(settings, stage):
        return build(settings, dataclasses.replace(stage, records=records))

    with pytest.raises(PlanChanged, match="other records"):
        small_search(everyone, records=records).run()


def test_a_trial_may_not_show_metrics_that_nobody_charges() -> None:
    def showing(settings, stage):
        trainer = build(settings, stage)
        trainer.evaluate_on = some_records(20, seed=9)
        return trainer

    with pytest.raises(PlanChanged, match="metrics nobody would charge"):
        small_search(showing).run()


def test_one_seed_for_all_trials_is_refused() -> None:
    def seeded(settings, stage):
        return build(settings, dataclasses.replace(stage, seed=3))

    with pytest.raises(PlanChanged, match="the same noise"):
        small_search(seeded).run()


def test_a_seeded_search_has_other_noise_in_each_trial() -> None:
    weights = []

    def watched(settings, stage):
        torch.manual_seed(0)
        trainer = build({"lr": 0.5}, stage)
        weights.append(next(trainer.model.parameters()))
        return trainer

    search = small_search(watched, seed=5)
    search.run_trials()
    first, *rest = weights[1:]  # after the rehearsal
    assert all(not torch.equal(first, other) for other in rest)


def test_the_usual_settings_stay_unless_others_are_clearly_better() -> None:
    search = small_search(margin=2.0)
    size = search._scored.public_size
    search.trials_left()  # begins the run, so that its trials can be claimed

    def add(value: float, settings: float) -> None:
        claim = search.ledger.claim_next(search.plan.event, "trial")
        search.study.add_trial(
            optuna.trial.create_trial(
                value=value,
                params={"lr": settings},
                distributions=SPACE,
                user_attrs={"claim": claim},
            )
        )

    add(0.6, 0.5)
    add(0.61, 1.0)
    noise = math.sqrt(2) * search.plan.trial_noise / size
    assert noise > 0.01
    assert search.best() == {"lr": 0.5}
    better = 0.6 + 2.1 * noise
    add(better, 2.0)
    assert search.best() == {"lr": 2.0}


def test_a_study_that_minimises_and_an_empty_space_are_refused() -> None:
    with pytest.raises(ValueError, match="maximise"):
        small_search(study=optuna.create_study(direction="minimize"))
    with pytest.raises(ValueError, match="empty"):
        TrialSearch(build, {}, some_records(), small_plan())
