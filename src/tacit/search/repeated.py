"""The best of a secret random number of full runs: one mechanism, which lets out that run alone.

A run draws its settings from a fixed law, trains on all records of its side, and is scored with
noise on the others. Runs are independent draws of one mechanism, K is drawn from a `NumRuns`, and
the one with the largest noisy score is let out with that score; equal scores are ordered by a fresh
random number. A run that crashes is a run with the worst score. `tacit.accounting.selection` has
the bounds and their proofs; they hold for one run that is `steps` subsampled Gaussians and one
Gaussian for the score, composed, wherever the record is.

**What must not be seen.** K, and everything about the other runs. So nothing is printed or stored
while it runs, callbacks are refused, there is no study, and the memory and time of the whole search
are not in the report. How long it took is seen by whoever waits: K follows from it roughly, so do
not publish it. Settings must not depend on earlier runs, so samplers that learn are refused.

**The ledger.** The search is one event of a plan of one step (`tacit.sampling.SelectedRun`). It is
charged, durably, before K is drawn. A search that is killed has spent it all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from tacit.accounting.plan import Plan, calibrate, epsilon_of_event
from tacit.budget import Budget
from tacit.errors import TacitError
from tacit.ledger import Ledger
from tacit.randomness import Randomness
from tacit.records import Records
from tacit.sampling.poisson import Poisson
from tacit.sampling.repeated_runs import SelectedRun, SelectedRunDpEvent
from tacit.search.scores import RightAnswers, Score, noisy_score, split_for_scores
from tacit.search.stages import SearchResult, SearchStage, Settings, built, seed_of_trial
from tacit.training.run import Run
from tacit.training.trainer import Trainer

if TYPE_CHECKING:
    import optuna

SCORE_NOISE = 20.0


@dataclass(frozen=True)
class SelectionPlan:
    """The privacy of a search by selection, fixed before it begins; see `plan_selection`."""

    budget: Budget
    scheme: SelectedRun
    noise_multiplier: float

    @property
    def plan(self) -> Plan:
        """What the ledger charges: one event."""
        return Plan(self.scheme, self.noise_multiplier, self.budget.relation, 1)

    @property
    def one_run(self) -> Plan:
        """Each run, without its score."""
        scheme = Poisson(self.scheme.rate)
        return Plan(scheme, self.noise_multiplier, self.budget.relation, self.scheme.run_steps)

    @cached_property
    def epsilon(self) -> float:
        return self.plan.epsilon(1, self.budget.delta)

    @cached_property
    def epsilon_of_one_run(self) -> float:
        """What would be printed if the search were not charged."""
        return self.one_run.epsilon(self.scheme.run_steps, self.budget.delta)

    def facts(self) -> dict[str, Any]:
        event = self.plan.step_event
        assert isinstance(event, SelectedRunDpEvent)
        steps, delta = self.scheme.run_steps, self.budget.delta
        num = max(1, round(self.scheme.mean_runs))
        return {
            "method": "repeat and select",
            "trials": self.scheme.mean_runs,
            "shape": self.scheme.shape,
            "score_noise": self.scheme.score_noise,
            "epsilon_of_search": self.epsilon - self.epsilon_of_one_run,
            "epsilon_of_final_run": self.epsilon_of_one_run,
            "epsilon": self.epsilon,
            "epsilon_rdp": self.plan.epsilon_rdp(1, delta),
            "epsilon_with_score": epsilon_of_event(event.one_run, delta, self.budget.relation),
            "overhead": self.epsilon / self.epsilon_of_one_run,
            "epsilon_uncharged": self.epsilon_of_one_run,
            "epsilon_of_full_trials": self.one_run.epsilon(num * steps, delta),
        }


def plan_selection(
    budget: Budget,
    rate: float,
    steps: int,
    *,
    trials: float = 50,
    shape: float | None = 0.0,
    score_noise: float = SCORE_NOISE,
) -> SelectionPlan:
    """Calibrate the noise of runs of `steps` steps at `rate`: the best of K is within the budget.

    `trials` is the expected number of runs, and `shape` the law of K (`tacit.sampling.NumRuns`): 0
    is the logarithmic one, 1 the geometric one, None the Poisson one, which costs the most.

    Example:
        >>> plan = plan_selection(tacit.Budget(3.0, 1e-5), rate=0.03, steps=1000, trials=50)
        >>> plan.epsilon_of_one_run, plan.epsilon  # 1.7, 3.0
    """
    scheme = SelectedRun(rate, steps, score_noise, trials, shape)
    return SelectionPlan(budget, scheme, calibrate(budget, scheme, 1))


@dataclass
class _Selection:
    """What the ledger is asked to charge for: the whole search."""

    plan: Plan
    epoch: Hashable | None = None
    sampling: str | None = None
    sampling_step: int | None = None

    def uncovered(self, model: nn.Module) -> list[nn.Parameter]:
        return []

    def draw_into(self, model: nn.Module, *charge: str | int) -> None:
        raise AssertionError("a selection sets no gradient")


def select_best(
    build: Callable[[Settings, SearchStage], Trainer],
    space: dict[str, Any],
    records: Records,
    plan: SelectionPlan,
    *,
    score: Score | None = None,
    score_share: float = 0.1,
    ledger: Ledger | str | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
    name: str = "search",
    seed: int | None = None,
) -> SearchResult:
    """Make a secret random number of runs, and return the best with its noisy score.

    The result is (ε, δ)-DP in the records, for `plan.epsilon` and the budget's δ and relation, if
    nothing else about the search is shown. Arguments are those of `TrialSearch`. `sampler` is one
    that draws settings without looking at results: Optuna's `RandomSampler`, the default.

        plan = tacit.search.plan_selection(budget, rate=0.03, steps=1000, trials=50)
        result = tacit.search.select_best(build, space, train, plan)
    """
    import optuna

    if not space:
        raise ValueError("the space is empty; give an Optuna distribution for each setting")
    if sampler is not None and type(sampler) is not optuna.samplers.RandomSampler:
        raise ValueError(
            f"{type(sampler).__name__} chooses settings by earlier runs or by their number, and "
            "the best of a random number of runs is private for independent draws alone; give "
            "optuna.samplers.RandomSampler(), or use TrialSearch, whose trials may be chosen "
            "adaptively"
        )
    score = RightAnswers() if score is None else score
    trained, scored = split_for_scores(records, score_share, plan.budget.relation)
    one = plan.one_run
    own = replace(plan.budget, epsilon=one.epsilon(one.steps or 0, plan.budget.delta))

    def stage_of(run: str) -> SearchStage:
        return SearchStage(trained, one, own, seed=seed_of_trial(seed, f"{name}: {run}"))

    draw = _draws(space, Randomness(seed), name)
    silent(built(build, draw("rehearsal"), stage_of("rehearsal"))).rehearse()
    opened = ledger if isinstance(ledger, Ledger) else Ledger(ledger, plan.budget)
    opened.begin(plan.plan, name=name, budget=plan.budget)
    try:
        opened.charge(_Selection(plan.plan))
    finally:
        opened.end()
    randomness = Randomness(seed)
    num_runs = plan.scheme.runs.draw(randomness.stream("number of runs", name))
    best: tuple[tuple[float, int], Run | None, dict[str, Any]] | None = None
    for number in range(1, num_runs + 1):
        settings, stream = draw(f"run {number}"), randomness.stream("score", name, number)
        found: Run | None = None
        value = -math.inf
        try:
            found = silent(built(build, settings, stage_of(f"run {number}"))).fit()
            held = scored.to(next(found.model.parameters()).device)
            noise = plan.scheme.score_noise
            value = noisy_score(found.model, held, found.loss, score, noise, stream)
        except Exception:
            found = None  # the worst score; why is not let out
        tie = int.from_bytes(stream.derived("ties").keystream(8), "little")
        if best is None or (value, tie) > best[0]:
            best = (value, tie), found, settings
    if best is None:
        raise TacitError("the number of runs was drawn as 0, so there is no model; it was charged")
    if best[1] is None:
        raise TacitError(
            "the selected run has failed, and the search was charged; try the settings on public "
            "records first (tacit.search.simulate)"
        )
    return _let_out(best[1], best[2], best[0][0], plan, name, scored)


def _let_out(
    run: Run,
    settings: dict[str, Any],
    value: float,
    plan: SelectionPlan,
    name: str,
    scored: Records,
) -> SearchResult:
    """The selected run, with the plan and ε of the whole search."""
    facts = {
        **plan.facts(),
        "run": name,
        "sampler": "RandomSampler",
        "settings": settings,
        "score_of_run": value,
        "scored_records": scored.public_size,
    }
    run = replace(
        run,
        plan=plan.plan,
        budget=plan.budget,
        steps=1,
        charged_steps=1,
        epsilon=plan.epsilon,
        epsilon_rdp=plan.plan.epsilon_rdp(1, plan.budget.delta),
        peak_memory_bytes=0,  # that of all runs together
        seconds=None,  # with the time of the whole search they would tell the number of runs
        search=facts,
    )
    return SearchResult(run, settings, facts)


def silent(trainer: Trainer) -> Trainer:
    """The trainer without its progress bar; other callbacks, which would let something out, are
    refused."""
    others = [c for c in trainer.callbacks if type(c).__name__ != "ProgressBar"]
    if others:
        raise ValueError(
            f"build gave the trainer a {type(others[0]).__name__}, and nothing may be let out of "
            "the runs that are not selected; make the trainer with callbacks=()"
        )
    trainer.callbacks = []
    return trainer


def _draws(
    space: dict[str, Any], randomness: Randomness, name: str
) -> Callable[[str], dict[str, Any]]:
    """Independent settings for each run, by a random sampler of Optuna's that sees no results."""
    import optuna

    def draw(run: str) -> dict[str, Any]:
        words = randomness.stream("settings", name, run).keystream(4)
        sampler = optuna.samplers.RandomSampler(int.from_bytes(words, "little"))
        study: Any = None  # a random sampler looks at none
        trial: Any = None
        return {
            setting: sampler.sample_independent(study, trial, setting, distribution)
            for setting, distribution in space.items()
        }

    return draw
