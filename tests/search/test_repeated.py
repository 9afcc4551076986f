"""Repeat and select, simulation, and the audit of a study."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

import tacit
from tacit.errors import BudgetExceeded, NotPublic, TacitError
from tacit.ledger import Ledger, read_statement
from tacit.report.privacy_statement import state
from tacit.sampling import SelectedRun
from tacit.search import (
    SelectionPlan,
    audit_search,
    plan_selection,
    select_best,
    simulate,
    synthetic_records,
)
from tests.search.small_search import (
    BUDGET,
    RATE,
    SPACE,
    STEPS,
    build,
    small_search,
    some_records,
)  # fmt: skip

optuna = pytest.importorskip("optuna")

# What `plan_selection` calibrates takes seconds; this noise is more than enough.
SELECTION = SelectionPlan(BUDGET, SelectedRun(RATE, STEPS, 20.0, 5.0, 1.0), 4.0)


def test_the_noise_is_calibrated_to_the_whole_search() -> None:
    plan = plan_selection(BUDGET, RATE, STEPS, trials=5, shape=1.0)
    assert 2.99 < plan.epsilon <= 3.0
    assert plan.epsilon_of_one_run < plan.epsilon / 1.2


def test_the_selected_run_is_let_out_with_the_whole_cost(tmp_path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    result = select_best(build, SPACE, some_records(), SELECTION, ledger=ledger)
    statement = read_statement(ledger)
    assert result.run.epsilon == statement.epsilon == SELECTION.epsilon
    assert result.facts["epsilon_uncharged"] < result.run.epsilon
    again = result.run.facts(some_records(50, seed=7))
    assert again["epsilon"] == SELECTION.epsilon
    assert again["search"]["method"] == "repeat and select"
    # With the time of one run, that of the search would tell the secret number of runs.
    assert again["seconds"] is None
    (charge,) = statement.runs
    assert state(again, ledger).content["date"] == charge.started
    with pytest.raises(BudgetExceeded):
        select_best(build, SPACE, some_records(), SELECTION, ledger=Ledger(ledger))


def test_the_search_is_charged_before_its_first_run(tmp_path) -> None:
    ledger, calls = tmp_path / "ledger.sqlite", []

    def stopped(settings, stage):
        calls.append(settings)
        if len(calls) == 2:  # a rehearsal came before
            raise KeyboardInterrupt
        return build(settings, stage)

    with pytest.raises(KeyboardInterrupt):
        select_best(stopped, SPACE, some_records(), SELECTION, ledger=ledger)
    assert read_statement(ledger).epsilon_charged == SELECTION.epsilon


def test_the_best_score_is_selected_and_a_crash_is_the_worst() -> None:
    seen = []

    def uneven(settings, stage):
        seen.append(settings)
        if len(seen) > 1 and len(seen) % 2 == 0:
            raise RuntimeError("a crash")
        return build(settings, stage)

    ended = set()
    for seed in range(8):
        seen.clear()
        with suppress(TacitError):
            result = select_best(uneven, SPACE, some_records(), SELECTION, seed=seed)
            assert result.settings in seen[2::2]  # those of runs that did not crash
            ended.add("selected")
            continue
        assert len(seen) == 2  # the only run has crashed
        ended.add("crashed")
    assert "selected" in ended


def test_runs_have_settings_and_noise_of_their_own() -> None:
    weights, rates = [], []

    def watched(settings, stage):
        torch.manual_seed(0)
        trainer = build({"lr": 0.5}, stage)
        rates.append(settings["lr"])
        weights.append(next(trainer.model.parameters()))
        return trainer

    for seed in range(6):
        select_best(watched, SPACE, some_records(), SELECTION, seed=seed)
    assert len(set(rates)) == len(rates)
    assert len({tuple(w.flatten().tolist()) for w in weights[1:]}) >= len(weights) - 6


def test_samplers_that_learn_and_callbacks_are_refused() -> None:
    for sampler in (optuna.samplers.TPESampler(), optuna.samplers.QMCSampler()):
        with pytest.raises(ValueError, match="independent draws alone; give optuna"):
            select_best(build, SPACE, some_records(), SELECTION, sampler=sampler)

    def loud(settings, stage):
        trainer = build(settings, stage)
        trainer.callbacks = [tacit.Callback()]
        return trainer

    with pytest.raises(ValueError, match="nothing may be let out"):
        select_best(loud, SPACE, some_records(), SELECTION)


def test_a_simulation_costs_what_the_final_run_costs() -> None:
    public = synthetic_records((4,), 2, 300)
    result = simulate(
        build, SPACE, some_records(), public, BUDGET, RATE, STEPS, trials=3, usual={"lr": 0.5}
    )
    alone = tacit.epsilon(
        result.run.plan.noise_multiplier, tacit.sampling.Poisson(RATE), STEPS, delta=1e-4
    )
    assert result.run.epsilon == alone
    assert result.facts["epsilon_of_search"] == 0


def test_private_records_are_not_taken_for_public_ones() -> None:
    records = some_records()
    copied = tacit.Records(records.inputs.clone(), records.targets.clone(), 2, public_size=400)
    with pytest.raises(NotPublic):
        simulate(build, SPACE, records, copied, BUDGET, RATE, STEPS, trials=1)


# ---- the audit -----------------------------------------------------------------------------------


def test_a_search_that_is_not_charged_is_caught(tmp_path) -> None:
    """The usual search: trials on ledgers that nobody keeps, and the ε of the last run."""
    records, ledger = some_records(), tmp_path / "ledger.sqlite"

    def run(rate, **more):
        model = torch.nn.Linear(4, 2)
        return tacit.Trainer(
            model,
            tacit.losses.CrossEntropy(),
            tacit.PerSampleClip(0.5),
            tacit.PoissonSampler(records, RATE, STEPS),
            torch.optim.SGD(model.parameters(), lr=rate),
            BUDGET,
            callbacks=(),
            **more,
        ).fit()

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")

    def objective(trial):
        done = run(trial.suggest_float("lr", 0.1, 1))
        return done.evaluate(some_records(50, seed=3)).accuracy

    study.optimize(objective, n_trials=3)
    last = run(study.best_params["lr"], ledger=ledger)
    audit = audit_search(last.epsilon, study, ledger)
    assert not audit.is_charged
    assert (audit.trials, audit.charged_trials) == (3, 0)
    assert audit.epsilon_owed == pytest.approx(last.plan.epsilon(4 * STEPS, 1e-4))
    with pytest.raises(ValueError, match="3 trials and the ledger charges 0 of them"):
        audit.require()


def test_a_printed_epsilon_below_the_charged_one_is_caught(tmp_path) -> None:
    search = small_search(ledger=tmp_path / "ledger.sqlite")
    result = search.run()
    tacit.save_run(result.run, tmp_path / "run", ledger=search.ledger)
    assert audit_search(tmp_path / "run", search.study, search.ledger.path).is_charged
    printed = search.plan.epsilon_of_final_run
    audit = audit_search(printed, search.study, search.ledger.path)
    assert not audit.is_charged
    assert "is less than what the ledger has charged" in audit.findings[0]
    other = optuna.create_study(direction="maximize")  # none of whose trials the ledger knows
    other.add_trial(optuna.trial.create_trial(value=0.5, params={}, distributions={}))
    assert audit_search(result.run.epsilon, other, search.ledger.path).charged_trials == 0


def test_a_study_beside_a_selection_is_caught(tmp_path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    select_best(build, SPACE, some_records(), SELECTION, ledger=ledger)
    study = optuna.create_study(direction="maximize")
    assert audit_search(SELECTION.epsilon, study, ledger).is_charged
    study.add_trial(optuna.trial.create_trial(value=0.5, params={}, distributions={}))
    assert not audit_search(SELECTION.epsilon, study, ledger).is_charged
