"""A search on records that are nobody's: public ones, or synthetic ones. It costs no privacy.

The settings are a function of public records and of public constants of the private run, so the
final run costs what it costs alone. The simulation trains with the noise that the private run will
have in its mean gradient: with m public records for n private ones, at the same rate, noise z·m/n
beside sums that are m/n times as long. Public records need no protection, so less noise is allowed.

How well settings carry over depends on how much the records resemble the private ones. That the
public records are not private ones under another name is checked as far as `require_public` can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from tacit.accounting.plan import Plan, calibrate
from tacit.budget import Budget
from tacit.queries.record_overlap import require_public
from tacit.records import Records
from tacit.sampling.poisson import Poisson
from tacit.search.cheap_trials import quiet_study
from tacit.search.scores import RightAnswers, Score, score_sum, split_for_scores
from tacit.search.stages import SearchResult, SearchStage, Settings, built
from tacit.training.preconditions import LedgerRun
from tacit.training.trainer import Trainer

if TYPE_CHECKING:
    import optuna

    from tacit.ledger import Ledger


def simulate(
    build: Callable[[Settings, SearchStage], Trainer],
    space: dict[str, Any],
    records: Records,
    public: Records,
    budget: Budget,
    rate: float,
    steps: int,
    *,
    trials: int = 50,
    usual: Settings | None = None,
    score: Score | None = None,
    score_share: float = 0.2,
    ledger: Ledger | str | None = None,
    study: optuna.Study | None = None,
    name: str = "search",
    seed: int | None = None,
) -> SearchResult:
    """Search on `public` records, then train once on `records` with the whole budget.

    The result is (ε, δ)-DP in `records` with the ε of the final run alone. The guarantee does not
    cover `public`. Arguments are those of `TrialSearch`.

        public = tacit.search.synthetic_records(train.shape, train.num_classes, 5000)
        result = tacit.search.simulate(build, space, train, public, budget, rate=0.03, steps=1000)
    """
    import optuna

    if trials < 1:
        raise ValueError(f"{trials} trials; give at least 1")
    require_public(public, records)
    score = RightAnswers() if score is None else score
    scheme = Poisson(rate)
    noise = calibrate(budget, scheme, steps)
    plan = Plan(scheme, noise, budget.relation, steps)
    trained, scored = split_for_scores(public, score_share, budget.relation)
    size = records.require_public_size("the noise of a simulation")
    scaled = noise * trained.require_public_size("the noise of a simulation") / size
    like = replace(plan, noise_multiplier=max(scaled, 1e-2))
    # Of a run on public records, so large that it says nothing.
    own = replace(budget, epsilon=max(1.0, 1.01 * like.epsilon(steps, budget.delta)))
    study = quiet_study() if study is None else study
    if study.direction != optuna.study.StudyDirection.MAXIMIZE:
        raise ValueError("the study minimises, and a larger score is better; maximise")
    if any(trial.state.name != "WAITING" for trial in study.get_trials(deepcopy=False)):
        raise ValueError(
            f"the study {study.study_name!r} holds trials already, and whether they were on "
            "private records is not known; give an empty study"
        )
    if usual is not None:
        study.enqueue_trial(dict(usual))
    found: list[tuple[float, Settings]] = []  # by this simulation, and by nobody else
    for number in range(trials):
        if sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False)) != number:
            raise ValueError(
                f"somebody else adds trials to the study {study.study_name!r}, and whether they "
                "are on private records is not known; give a study of its own"
            )
        trial = study.ask(space)
        try:
            trainer = built(build, trial.params, SearchStage(trained, like, own))
            trainer.callbacks = []
            run = trainer.fit()
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        held = scored.to(next(run.model.parameters()).device)
        value = score_sum(run.model, held, run.loss, score) / max(1, len(held))
        study.tell(trial, value)
        found.append((value, trial.params))
    if not found:
        raise ValueError("no trial is complete; all of them were pruned")
    settings = dict(max(found, key=itemgetter(0))[1])
    stage = SearchStage(records, plan, budget, LedgerRun(ledger, name), seed, is_final=True)
    run = built(build, settings, stage).fit()
    facts = {
        "method": "simulation",
        "trials": trials,
        "run": name,
        "epsilon_of_search": 0.0,
        "epsilon_of_final_run": run.epsilon,
        "epsilon": run.epsilon,
        "overhead": 1.0,
        "epsilon_uncharged": run.epsilon,
        "sampler": type(study.sampler).__name__,
        "settings": settings,
        "usual_settings": None if usual is None else dict(usual),
        "simulated_on": public.name,
    }
    run.search = facts
    return SearchResult(run, settings, facts)


def synthetic_records(
    shape: tuple[int, ...], num_classes: int, size: int, *, overlap: float = 1.0, seed: int = 0
) -> Records:
    """Records made of nothing: one Gaussian cloud per class, in [0, 1], with the given shape.

    Class k's inputs are N(m_k, s²) with the centres m_k uniform in the cube and s such that the
    nearest centres are about 2 / `overlap` deviations apart. It has the shape, the number of
    classes and the size of the task, and nothing else of it.
    """
    if num_classes < 2 or size < num_classes or not overlap > 0:
        raise ValueError("give two classes or more, at least one record each, and overlap above 0")
    generator = torch.Generator().manual_seed(seed)
    features = int(torch.tensor(shape).prod())
    centres = torch.rand(num_classes, features, generator=generator)
    apart = torch.pdist(centres).min()
    classes = torch.randint(num_classes, (size,), generator=generator)
    deviation = float(apart) * overlap / 2
    inputs = centres[classes] + deviation * torch.randn(size, features, generator=generator)
    return Records(
        inputs.clamp(0, 1).reshape(size, *shape),
        classes,
        num_classes,
        public_size=size,
        name="synthetic records",
    )
