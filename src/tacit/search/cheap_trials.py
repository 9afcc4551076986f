"""Many cheap noisy trials, then one full run: all in one plan, composed exactly.

A trial trains on every record of its part in each of its few steps, without subsampling, so that
its n steps at noise multiplier z·√n are together one Gaussian mechanism of multiplier z, exactly.
The whole search is planned before it begins, as a run of a ledger:

    prelude   T Gaussians of multiplier z, one for each trial
    steps     the N subsampled steps of the final run

and its ε is by PLD of all of them. Settings that do not change this plan (learning rates, clipping
norms, losses, networks) may be chosen after looking at any earlier trial: mechanisms that are fixed
beforehand compose adaptively, whatever else about them is chosen on the way.

**One Gaussian pays for a trial and for its score.** The records are split once, each by itself
(`split_for_scores`). A trial trains on one side and is scored on the other by a sum of sensitivity
1 with noise z. A neighbouring dataset differs on one side only.

    Proof. If the record is on the trained side, the weights' Gaussians have multiplier z together
    and the score is a function of the weights and of records that are the same: post-processing.
    If it is on the scored side, the weights have the same law in both datasets, and given them the
    score is a Gaussian of multiplier z. In either case the trial is dominated by the Gaussian pair
    of multiplier z, given everything that came before. So T trials compose to the T Gaussians of
    the plan, with the side fixed by the record.  ∎

The final run takes all records. It is composed with the trials, so it may use what they found.

**The ledger.** The whole prelude is charged when the search begins, before the first trial. Each
trial claims one of its Gaussians first, durably, and a claim is never given back: a trial that
crashes, is pruned or is killed is charged like any other, and a search has as many claims as it
planned trials, in all processes together. What is left unclaimed was charged too.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import dp_accounting as dpa
from scipy.optimize import brentq

from tacit.accounting.composition import COARSE
from tacit.accounting.plan import Plan, calibrate
from tacit.budget import Budget
from tacit.errors import BudgetExceeded, TacitError
from tacit.ledger import Ledger
from tacit.randomness import Randomness
from tacit.records import Records
from tacit.sampling.poisson import Poisson
from tacit.search.scores import RightAnswers, Score, noisy_score, split_for_scores
from tacit.search.stages import (
    SearchResult,
    SearchStage,
    Settings,
    Transfer,
    built,
    equivalent_mu,
    seed_of_trial,
)
from tacit.training.preconditions import LedgerRun
from tacit.training.trainer import Trainer

if TYPE_CHECKING:
    import optuna

_CLAIM, _MOST_FAILURES = "trial", 3
FEWEST_STEPS, MOST_STEPS = 10, 60
_WARM_UP = 8  # steps that momentum of 0.9 takes to get going
_SLACK = 1e-3  # of the final run's share, so that rounding does not raise the overhead
# Usual share of the records that trials are scored on: such that the noise is half a percent.
_LEAST_SHARE, _MOST_SHARE, _SCORE_NOISE = 0.1, 0.3, 0.005


@dataclass(frozen=True)
class TrialPlan:
    """The privacy of a search by cheap trials, fixed before it begins; see `plan_trials`.

    `trial_noise` is the multiplier of a whole trial. `plan` is what the ledger charges.
    """

    budget: Budget
    rate: float
    steps: int
    trials: int
    trial_steps: int
    trial_noise: float
    noise_multiplier: float

    @property
    def event(self) -> dpa.GaussianDpEvent:
        """What one trial costs."""
        return dpa.GaussianDpEvent(self.trial_noise)

    @property
    def plan(self) -> Plan:
        prelude = (self.event,) * self.trials
        return replace(self.final_run, prelude=prelude)

    @property
    def final_run(self) -> Plan:
        """The final run alone."""
        relation = self.budget.relation
        return Plan(Poisson(self.rate), self.noise_multiplier, relation, self.steps)

    @property
    def trial(self) -> Plan:
        """One trial: full batches, with the trial's noise shared out over its steps."""
        noise = self.trial_noise * math.sqrt(self.trial_steps)
        return Plan(Poisson(1.0), noise, self.budget.relation, self.trial_steps)

    @cached_property
    def epsilon(self) -> float:
        """ε of the trials and the final run together, by PLD."""
        return self.plan.epsilon(self.steps, self.budget.delta)

    @cached_property
    def epsilon_of_trials(self) -> float:
        return self.plan.epsilon_of_count(0, self.budget.delta)

    @cached_property
    def epsilon_of_final_run(self) -> float:
        """What would be printed if the search were not charged."""
        return self.final_run.epsilon(self.steps, self.budget.delta)

    @cached_property
    def epsilon_of_full_trials(self) -> float:
        """ε if each trial had been a run like the final one: the cost of the usual search."""
        plan = self.final_run
        return plan.epsilon((self.trials + 1) * self.steps, self.budget.delta)

    @property
    def transfer(self) -> Transfer:
        delta = self.budget.delta
        final = equivalent_mu(self.epsilon_of_final_run, delta)
        return Transfer(self.steps, self.trial_steps, final, 1 / self.trial_noise)

    def facts(self) -> dict[str, Any]:
        return {
            "method": "cheap trials",
            "trials": self.trials,
            "trial_steps": self.trial_steps,
            "trial_noise": self.trial_noise,
            "epsilon_of_search": self.epsilon_of_trials,
            "epsilon_of_final_run": self.epsilon_of_final_run,
            "epsilon": self.epsilon,
            "overhead": self.epsilon / self.epsilon_of_final_run,
            "epsilon_uncharged": self.epsilon_of_final_run,
            "epsilon_of_full_trials": self.epsilon_of_full_trials,
        }


def plan_trials(
    budget: Budget,
    rate: float,
    steps: int,
    *,
    trials: int = 50,
    overhead: float = 1.3,
    trial_steps: int | None = None,
) -> TrialPlan:
    """Share a budget out between `trials` cheap trials and one run of `steps` steps at `rate`.

    The final run alone has ε / `overhead`; the trials have what is left, in equal parts. The final
    run's noise is then calibrated again with them, so that all together is within the budget.
    `trial_steps` full batches are a trial: by default as many, from 10 to 60, as let learning rates
    carry over to the final run nearly as they are (`Transfer`). More cost time and no privacy.

    Example:
        >>> plan = plan_trials(tacit.Budget(3.0, 1e-5), rate=0.03, steps=1000, trials=50)
        >>> plan.epsilon_of_final_run, plan.epsilon  # 2.3, 3.0
    """
    if trials < 1 or steps < 1:
        raise ValueError(f"{trials} trials and {steps} steps; give at least 1 of each")
    if not 1.01 <= overhead <= 100:
        raise ValueError(f"overhead is {overhead}; give a number from 1.01, such as 1.3")
    scheme = Poisson(rate)
    share = budget.epsilon / overhead * (1 + _SLACK)
    alone = calibrate(replace(budget, epsilon=share), scheme, steps)
    plan = Plan(scheme, alone, budget.relation, steps)

    def excess(log_z: float) -> float:
        together = dpa.GaussianDpEvent(math.exp(log_z) / math.sqrt(trials))
        spent = replace(plan, prelude=(together,)).epsilon(steps, budget.delta, COARSE)
        return math.log(spent / budget.epsilon)

    low = math.log(math.sqrt(trials)) - 3.0
    high = low + 1.0
    while excess(high) > 0:
        low, high = high, high + 1.0
    noise = float(f"{math.exp(brentq(excess, low, high, xtol=1e-3)):.4g}")
    if trial_steps is None:  # such that learning rates carry over nearly as they are
        mu = equivalent_mu(budget.epsilon / overhead, budget.delta)
        same = round(steps / (noise * mu)) + _WARM_UP
        trial_steps = min(max(FEWEST_STEPS, same), MOST_STEPS)
    prelude = (dpa.GaussianDpEvent(noise),) * trials
    final = calibrate(budget, scheme, steps, prelude=prelude)
    return TrialPlan(budget, scheme.rate, steps, trials, trial_steps, noise, final)


class TrialSearch:
    """A search by cheap trials with Optuna, charged to a ledger, and the final run.

    Everything that it lets out (the study with all its settings and scores, and the final weights)
    is (ε, δ)-DP in the records, for `plan.epsilon` and the budget's δ and relation. Several
    processes, on several machines, may run trials of one search: each makes the same `TrialSearch`
    with the same ledger file and a study in the same Optuna storage, and one of them calls
    `finish`.

        plan = tacit.search.plan_trials(budget, rate=0.03, steps=1000, trials=50)
        space = {"lr": optuna.distributions.FloatDistribution(0.1, 20, log=True)}
        search = tacit.search.TrialSearch(build, space, train, plan, usual={"lr": 2.0})
        result = search.run()

    Args:
        build: makes the trainer of a `SearchStage` from settings.
        space: Optuna's distribution of each setting.
        records: the private records: trials train on some and are scored on the others; the final
            run trains on all.
        usual: settings that are tried first. The best of the others is taken only if its score is
            better by `margin` standard deviations of the noise in the difference.
        score: what is summed over the scored records; by default, right answers.
        score_share: share of the records that trials are scored on. By default from 0.1 to 0.3,
            such that the score's noise is half a percent of them where that is possible.
        ledger: a file, or an open ledger. By default one in memory, for one process.
        study: an Optuna study that maximises. Its sampler may look at earlier trials. One that
            holds trials of another search is refused.
        name: of the run on the ledger. A search of that name is continued.
        seed: fixes all noise. Without it, noise is secret.
    """

    def __init__(
        self,
        build: Callable[[Settings, SearchStage], Trainer],
        space: dict[str, Any],
        records: Records,
        plan: TrialPlan,
        *,
        usual: Settings | None = None,
        score: Score | None = None,
        score_share: float | None = None,
        margin: float = 2.0,
        ledger: Ledger | str | None = None,
        study: optuna.Study | None = None,
        name: str = "search",
        seed: int | None = None,
    ) -> None:
        import optuna

        if not space:
            raise ValueError("the space is empty; give an Optuna distribution for each setting")
        if not margin >= 0:
            raise ValueError(f"margin is {margin}; give 0 or more")
        if usual is not None and set(usual) != set(space):
            raise ValueError(f"usual has {sorted(usual)}, and the space {sorted(space)}")
        self.build, self.space, self.plan = build, dict(space), plan
        self.records = records
        self.usual = None if usual is None else dict(usual)
        self.score = RightAnswers() if score is None else score
        self.margin, self.name, self.seed = margin, name, seed
        self.ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger, plan.budget)
        self.study = study if study is not None else quiet_study()
        if self.study.direction != optuna.study.StudyDirection.MAXIMIZE:
            raise ValueError("the study minimises, and a larger score is better; maximise")
        if score_share is None:
            size = records.require_public_size("a share of the records")
            wanted = plan.trial_noise / (_SCORE_NOISE * size)
            score_share = min(max(_LEAST_SHARE, wanted), _MOST_SHARE)
        self._trained, self._scored = split_for_scores(records, score_share, plan.budget.relation)
        self._randomness = Randomness(seed)

    def run(self) -> SearchResult:
        """All trials that are left, then the final run."""
        self.run_trials()
        return self.finish()

    def trials_left(self) -> int:
        """How many trials no process has begun; begins the search, and with it charges all."""
        self._begin()
        return self.plan.trials - len(self.ledger.claims_of(self.name) or ())

    def run_trials(self, most: int | None = None) -> int:
        """Run trials until none is left, or `most` of them; return how many were run here."""
        import optuna

        if self.trials_left() == 0:
            return 0
        ran = 0
        while most is None or ran < most:
            self._require_own_trials()
            try:
                # No other ledger has a claim of this name, so a trial shows which one paid for it.
                nonce = secrets.token_hex(8)
                claim = self.ledger.claim_next(self.plan.event, f"{_CLAIM} {nonce}")
            except BudgetExceeded:
                break
            trial = self._next_trial()
            trial.set_user_attr("claim", claim)
            ran += 1
            try:
                value = self._value_of(trial.params, claim)
            except optuna.TrialPruned:
                self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            except Exception as error:
                trial.set_user_attr("error", type(error).__name__)
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
                states = [t.state for t in self._trials()]
                if states.count(optuna.trial.TrialState.FAIL) == len(states) >= _MOST_FAILURES:
                    raise TacitError(
                        f"all of the first {len(states)} trials failed, and each was charged; the "
                        f"last one says: {error}"
                    ) from error
            else:
                self.study.tell(trial, value)
        return ran

    def best(self) -> dict[str, Any]:
        """The settings of the final run, from what the trials released."""
        import optuna

        self._require_own_trials()
        complete = [t for t in self._trials() if t.state == optuna.trial.TrialState.COMPLETE]
        if not complete:
            raise ValueError("no trial is complete; run_trials() first")
        best = max(complete, key=_value)
        usual = [t for t in complete if self.usual is not None and t.params == self.usual]
        if usual:
            size = self._scored.require_public_size("the noise of a score")
            least = self.margin * math.sqrt(2) * self.plan.trial_noise / size
            if _value(best) < max(map(_value, usual)) + least:
                return dict(usual[0].params)
        return dict(best.params)

    def final_stage(self) -> SearchStage:
        """The stage of the final run, whose trainer is charged to the search's run."""
        plan = self.plan.plan
        ledger = LedgerRun(self.ledger, self.name, plan.prelude)
        seed = seed_of_trial(self.seed, f"{self.name}: final run")
        return SearchStage(self.records, plan, self.plan.budget, ledger, seed, is_final=True)

    def finish(self, settings: Settings | None = None, resume: Any = None) -> SearchResult:
        """The final run, by default with the best settings. `resume` is a checkpoint's folder."""
        self._require_own_trials()
        settings = self.best() if settings is None else dict(settings)
        trainer = built(self.build, settings, self.final_stage())
        run = trainer.fit(resume=resume)
        facts = self.facts(settings)
        run.search = facts
        return SearchResult(run, dict(settings), facts)

    def facts(self, settings: Settings) -> dict[str, Any]:
        """What run.json says of the search."""
        states = [trial.state.name.lower() for trial in self._trials()]
        return {
            **self.plan.facts(),
            "run": self.name,
            "sampler": type(self.study.sampler).__name__,
            "states": {state: states.count(state) for state in sorted(set(states))},
            "settings": dict(settings),
            "usual_settings": self.usual,
            "score": repr(self.score),
            "scored_records": self._scored.public_size,
        }

    def _begin(self) -> None:
        """Begin or continue the search's run, after a rehearsal in which nothing is charged."""
        budget, plan = self.plan.budget, self.plan.plan
        if self.ledger.budget.delta != budget.delta:
            raise ValueError(
                f"the ledger is for delta {self.ledger.budget.delta:g}, the search for "
                f"{budget.delta:g}; give both the same"
            )
        self._require_own_trials()  # before anything is charged
        if self.ledger.claims_of(self.name) is None:
            example = self.usual or {n: _middle(d) for n, d in self.space.items()}
            built(self.build, example, self._stage_of_trial("rehearsal")).rehearse()
        self.ledger.begin(plan, name=self.name, budget=budget)

    def _next_trial(self) -> optuna.trial.Trial:
        if self.usual is not None and not self._trials():
            self.study.enqueue_trial(self.usual, user_attrs={"usual": True})
        return self.study.ask(self.space)

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return [t for t in self.study.get_trials(deepcopy=False) if t.state.name != "WAITING"]

    def _require_own_trials(self) -> None:
        """Refuse a study with a result that this search's run on the ledger has not paid for.

        What the sampler and `best` read is then charged here, each trial by a claim of its own.
        """
        ended = [trial for trial in self._trials() if trial.state.is_finished()]
        claims = [trial.user_attrs.get("claim") for trial in ended]
        own = set(self.ledger.claims_of(self.name) or ())
        if len(set(claims)) < len(claims) or not own.issuperset(claims):
            raise ValueError(
                f"the study {self.study.study_name!r} holds trials that the run {self.name!r} of "
                "this ledger has not charged, and settings that follow from them would not be "
                "counted; give a study of its own to each search (another storage or study name), "
                "or the ledger that its trials were charged to"
            )

    def _stage_of_trial(self, name: str) -> SearchStage:
        plan = self.plan.trial
        # A trial's own ledger is in memory. The search's ledger has charged for the trial.
        epsilon = plan.epsilon(self.plan.trial_steps, self.plan.budget.delta)
        own = replace(self.plan.budget, epsilon=epsilon)
        seed = seed_of_trial(self.seed, f"{self.name}: {_number_of(name)}")
        return SearchStage(self._trained, plan, own, seed=seed, transfer=self.plan.transfer)

    def _value_of(self, settings: Settings, claim: str) -> float:
        """Train the trial that has this claim, and release its score."""
        trainer = built(self.build, settings, self._stage_of_trial(claim))
        trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ != "ProgressBar"]
        run = trainer.fit()
        stream = self._randomness.stream("score of a trial", self.name, _number_of(claim))
        scored = self._scored.to(next(run.model.parameters()).device)
        noise = self.plan.trial_noise
        return noisy_score(run.model, scored, run.loss, self.score, noise, stream)


def _value(trial: optuna.trial.FrozenTrial) -> float:
    assert trial.value is not None
    return trial.value


def _middle(distribution: Any) -> Any:
    """A setting to rehearse with."""
    if hasattr(distribution, "choices"):
        return distribution.choices[0]
    low, high = distribution.low, distribution.high
    middle = math.sqrt(low * high) if distribution.log else (low + high) / 2
    return int(middle) if isinstance(low, int) else middle


def _number_of(claim: str) -> str:
    """A claim without its nonce, so that a seed makes a search reproducible."""
    return claim.rpartition(", ")[2]


def quiet_study(storage: Any = None, name: str | None = None) -> optuna.Study:
    """A study that maximises, with Optuna's TPE; one of that name in the storage is continued."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        sampler = optuna.samplers.TPESampler(constant_liar=True)
        return optuna.create_study(
            storage=storage,
            study_name=name,
            direction="maximize",
            sampler=sampler,
            load_if_exists=name is not None,
        )
    finally:
        optuna.logging.set_verbosity(level)
