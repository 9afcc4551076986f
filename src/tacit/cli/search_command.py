"""`tacit search`: settings are searched for, the search is charged, and the final run is saved."""

from __future__ import annotations

import hashlib
import math
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.cli.console import imported_plugins, print_json, ranks_started
from tacit.cli.schema import command_of, options_of, to_dict
from tacit.cli.search_settings import SEARCHED, SearchSettings
from tacit.cli.settings import USUAL_DATASET, TrainSettings

if TYPE_CHECKING:
    import torch

    from tacit.cli.build_data import RunData
    from tacit.cli.build_model import Recipe
    from tacit.ledger import Ledger
    from tacit.records import Records
    from tacit.search import Score, SearchResult, SearchStage
    from tacit.training.trainer import Trainer

NAME = "search"


def search(s: SearchSettings) -> None:
    r"""Search for settings with differential privacy, train with the best, and save the run.

    Epsilon is that of the whole search with its final run.

    Example: tacit search --dataset fashion-mnist --trials 50 --epsilon 3 --out runs/s

    Over the clipping norm too: tacit search --data t.csv --schema t.toml --over lr,max-norm

    Continue a search that was killed: the same command with the same --out

    On several machines: the same command with --worker, a shared --out and --storage

    Needs the extra search: pip install 'tacit\[search]'
    """
    from tacit.cli import run_directory
    from tacit.training.state_file import only_process

    _require_optuna()
    if ranks_started() > 1:
        raise ValueError("tacit search runs in one process; start several with --worker instead")
    t = train_settings(s)
    stem = t.data.stem if t.data else (t.dataset or USUAL_DATASET).replace("/", "-")
    folder = s.out or run_directory.new_folder(f"search-{stem}")
    if (folder / "run.json").exists():
        raise ValueError(f"{folder} holds a finished run; give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    with nullcontext() if s.worker else only_process(folder):
        facts = _searched_in(folder, s, t)
    if facts is None:
        typer.echo(f"no trial is left; finish with the same command without --worker: {folder}")
    elif s.json:
        print_json(facts)
    else:
        from rich.console import Console

        from tacit.training.run import summary_table

        console = Console()
        console.print(summary_table(facts))
        console.print(f"settings: {facts['search']['settings']}", highlight=False, soft_wrap=True)
        console.print(f"written to {folder}/", highlight=False, soft_wrap=True)


def train_settings(s: SearchSettings) -> TrainSettings:
    """The settings of the final run, or an error for those that a search does not take."""
    shared = options_of(SearchSettings)
    own = ("out", "ledger", "json", "quiet")
    names = [name for name in options_of(TrainSettings) if name in shared and name not in own]
    t = TrainSettings(**{name: getattr(s, name) for name in names})
    usual = {name: o.default for name, o in options_of(TrainSettings).items()}
    for name, why in _REFUSED.items():
        if getattr(t, name) != usual[name]:
            raise ValueError(f"{shared[name].with_value(getattr(t, name))}, and {why}")
    if t.query == "batch-clip":
        raise ValueError(
            "--query is batch-clip, and the trials of a search bound single records; give clip or "
            "clipless"
        )
    if t.sampling not in (None, "poisson"):
        raise ValueError(f"--sampling is {t.sampling}; tacit search trains on Poisson samples")
    for name in s.over:
        if name not in SEARCHED:
            raise ValueError(f"--over names {name}; give some of {', '.join(SEARCHED)}")
        needed = {"max-norm": "clip", "gradient-clip": "clipless"}.get(name)
        if needed not in (None, t.query):
            raise ValueError(f"--over names {name}, which goes with --query {needed}")
    return t


_FIXED = "a search calibrates the noise of its trials and of the final run; leave it out"
_REFUSED = {
    "noise_multiplier": _FIXED,
    "noise": "a search has one noise for all blocks; leave it out",
    "layerwise": "trials have no public records to set constants from; leave it out",
    "groups": "trials have no public records to group blocks by; leave it out",
    "public_share": "trials have no use for public records; leave it out",
    "sparsify": "trials are too short for it; leave it out",
    "statistics": "trials have no running statistics; leave it out",
    "max_batch_size": "a trial takes all records in each step; leave it out",
    "scale_noise": "a search releases nothing before its trials; declare --feature-range",
    "category_noise": "a search releases nothing before its trials; leave it out",
    "shard": "a search runs in one process; leave it out",
}


def _require_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "tacit search needs Optuna, which is not installed; pip install 'tacit[search]'"
        ) from error


class _Builder:
    """Makes the trainers of a search from the settings of the command line."""

    def __init__(
        self, s: SearchSettings, t: TrainSettings, folder: Path, device: torch.device
    ) -> None:
        from tacit.cli import build_data, build_model, build_query

        self.s, self.t, self.folder, self.device = s, t, folder, device
        dataset = "" if t.data else t.dataset or USUAL_DATASET
        recipe = build_model.recipe_for(dataset, t.query, t.features)
        self.tailored = build_model.tailored_for(dataset, t.features)
        self.budget = build_query.budget_for(t)
        build_model.require_model(t.model)
        self.data: RunData = build_data.run_data(t, self.budget.relation, device)
        if self.data.releases:
            raise ValueError(
                "the ranges of columns would be released before the trials, which tacit search "
                "does not do; declare them with --feature-range or --schema, or give "
                "--range-noise 0"
            )
        self.recipe: Recipe = build_model.recipe_of_task(recipe, self.data.task, t.query)
        self.loss_name = t.loss or build_model.USUAL_LOSSES[self.data.task]
        self.sampling = build_query.sampling_plan(t, self.recipe, self.data.size)

    @property
    def rate(self) -> float:
        return self.sampling.batch_size / self.data.size

    def usual(self) -> dict[str, float]:
        """The usual value of each setting that is searched."""
        from tacit.cli.build_model import loss_numbers

        clips = self.recipe.max_norm, self.recipe.gradient_clip
        values: dict[str, float | None] = {
            "lr": self.t.lr or self.recipe.learning_rate,
            "max-norm": self.t.max_norm or clips[0],
            "gradient-clip": self.t.gradient_clip or clips[1],
            "temperature": loss_numbers(self.t, self.loss_name, self.recipe, self.tailored).get(
                "temperature"
            ),
        }
        for name in self.s.over:
            if not values[name]:
                raise ValueError(f"--over names {name}, which --loss {self.loss_name} has not")
        return {name: float(values[name] or 0) for name in self.s.over}

    def space(self) -> dict[str, Any]:
        from optuna.distributions import FloatDistribution

        around = self.s.within
        return {
            name: FloatDistribution(value / around, value * around, log=True)
            for name, value in self.usual().items()
        }

    def __call__(self, settings: Any, stage: SearchStage) -> Trainer:
        import torch

        from tacit.cli import build_model, build_query
        from tacit.noise import Noise
        from tacit.training import Callback, Checkpoint, MovingAverage, ProgressBar, Trainer

        chosen = {name.replace("-", "_"): value for name, value in settings.items()}
        t = replace(self.t, **chosen)
        rate = t.lr or self.recipe.learning_rate
        momentum = build_model.USUAL_MOMENTUM if t.momentum is None else t.momentum
        scaled = (
            stage.adam_rate(rate) if t.optimizer == "adam" else stage.learning_rate(rate, momentum)
        )
        data, recipe = self.data, self.recipe
        numbers = build_model.loss_numbers(t, self.loss_name, recipe, self.tailored)
        loss = build_model.loss_for(self.loss_name, numbers, t.query)
        outputs = build_model.num_outputs_for(self.loss_name, loss, data.task, data.private)
        network, _ = build_model.architecture_for(
            t.model, data.private.shape, outputs, t.query
        ).build()
        network.to(self.device)
        optimizer = build_model.optimizer_for(replace(t, lr=scaled), network, recipe)
        query = build_query.query_for(t, recipe, network, loss, data, self.sampling, None)
        options: dict[str, Any] = {"max_physical_batch": t.max_physical_batch}
        if self.device.type == "cuda" and stage.is_final:
            options["pad_to"] = 32
        callbacks: list[Callback] = []
        if stage.is_final and not self.s.quiet:
            callbacks.append(ProgressBar())
        privacy = stage.privacy() | {"noise": Noise(stage.plan.noise_multiplier)}
        if t.seed is not None:
            torch.manual_seed(t.seed)
        trainer = Trainer(
            network,
            loss,
            query,
            stage.sampler(**options),
            optimizer,
            scheduler=build_model.scheduler_for(t, recipe, optimizer, stage.steps),
            moving_average=None if t.ema is None else MovingAverage(t.ema),
            evaluate_on=data.test if stage.is_final else None,
            callbacks=callbacks,
            checkpoint=Checkpoint(self.folder) if stage.is_final and self._in_file(stage) else None,
            **privacy,
        )
        trainer.notes += list(data.notes)
        trainer.config = {
            "settings": to_dict(t),
            "search_settings": to_dict(self.s)["search"],
            "used": {
                "dataset": str(t.data or t.dataset or USUAL_DATASET),
                "steps": stage.steps,
                "batch_size": self.sampling.batch_size,
                "lr": rate,
                **build_query.clips_for(t, recipe)._asdict(),
                "loss": repr(loss),
                "loss_name": self.loss_name,
                "loss_numbers": numbers,
                "plugins": imported_plugins(),
                "input_shape": list(data.private.shape),
                "num_outputs": outputs,
                "model": str(network),
            },
        }
        return trainer

    @staticmethod
    def _in_file(stage: SearchStage) -> bool:
        from tacit.ledger import Ledger

        ledger = None if stage.ledger is None else stage.ledger.ledger
        return isinstance(ledger, Ledger) and ledger.path is not None

    def score(self) -> Score:
        from tacit.search import BoundedLoss, RightAnswers

        if self.s.score == "right-answers":
            return RightAnswers()
        guess = math.log(self.data.private.num_classes or 2)
        return BoundedLoss(self.s.most_loss or 2 * guess)


def _searched_in(folder: Path, s: SearchSettings, t: TrainSettings) -> dict[str, Any] | None:
    import torch

    from tacit.cli import run_directory
    from tacit.cli.console import device_for
    from tacit.report.run_folder import save_run

    if t.seed is None:
        torch.seed()
    build = _Builder(s, t, folder, device_for(t.device))
    data = build.data
    ledger = run_directory.open_ledger(s.ledger or folder / "ledger.sqlite", build.budget)
    with ledger:
        result = _METHODS[s.method](build, ledger)
        if result is None:
            return None
        result.run.notes += run_directory.delta_note(build.budget.delta, data.size)
        facts = save_run(
            result.run,
            folder,
            data.test,
            preprocessing=data.preprocessing,
            schema=data.schema,
            ledger=ledger,
        )
    run_directory.remove_unfinished(folder)
    return facts


def _by_trials(build: _Builder, ledger: Ledger) -> SearchResult | None:
    from tacit.search import TrialSearch, plan_trials
    from tacit.search.cheap_trials import quiet_study
    from tacit.training.state_file import CHECKPOINT

    s = build.s
    plan = plan_trials(
        build.budget,
        build.rate,
        build.sampling.steps,
        trials=s.trials,
        overhead=s.overhead,
        trial_steps=s.trial_steps,
    )
    storage = s.storage or f"sqlite:///{build.folder.resolve() / 'study.sqlite3'}"
    search = TrialSearch(
        build,
        build.space(),
        build.data.private,
        plan,
        usual=build.usual(),
        score=build.score(),
        score_share=s.score_share,
        ledger=ledger,
        study=quiet_study(storage, _study_name(s, build.folder)),
        name=NAME,
        seed=build.t.seed,
    )
    if s.quiet or s.json:
        search.run_trials()
    else:
        _show_trials(search)
    if s.worker:
        return None
    resumed = build.folder if (build.folder / CHECKPOINT).exists() else None
    return search.finish(resume=resumed)


def _study_name(s: SearchSettings, folder: Path) -> str:
    """A name of its own for each ledger, since several searches may share a storage."""
    if s.storage is None:
        return NAME
    ledger = (s.ledger or folder / "ledger.sqlite").resolve()
    return f"{NAME} {hashlib.blake2b(os.fsencode(ledger), digest_size=8).hexdigest()}"


def _show_trials(search: Any) -> None:
    """Run the trials one by one, with what each released."""
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task("trials", total=search.plan.trials)
        while left := search.trials_left():
            progress.update(task, completed=search.plan.trials - left)
            search.run_trials(1)


def _by_selection(build: _Builder, ledger: Ledger) -> SearchResult:
    from tacit.search import plan_selection, select_best

    s = build.s
    plan = plan_selection(
        build.budget, build.rate, build.sampling.steps, trials=s.trials, shape=s.shape
    )
    return select_best(
        build,
        build.space(),
        build.data.private,
        plan,
        score=build.score(),
        score_share=s.score_share or 0.1,
        ledger=ledger,
        name=NAME,
        seed=build.t.seed,
    )


def _by_simulation(build: _Builder, ledger: Ledger) -> SearchResult:
    from tacit.search import simulate

    s = build.s
    return simulate(
        build,
        build.space(),
        build.data.private,
        _public_records(build),
        build.budget,
        build.rate,
        build.sampling.steps,
        trials=s.trials,
        usual=build.usual(),
        score=build.score(),
        score_share=s.score_share or 0.2,
        ledger=ledger,
        name=NAME,
        seed=build.t.seed,
    )


def _public_records(build: _Builder) -> Records:
    from tacit.data import load
    from tacit.search import synthetic_records

    private = build.data.private
    if build.s.simulate_on is not None:
        public, _ = load(build.s.simulate_on)
        if public.shape != private.shape or public.num_classes != private.num_classes:
            raise ValueError(
                f"--simulate-on is {build.s.simulate_on}, with records of shape {public.shape} and "
                f"{public.num_classes} classes; these have {private.shape} and "
                f"{private.num_classes}: give another dataset, or leave it out"
            )
        return public.to(build.device)
    if build.data.task != "classification" or private.num_classes is None:
        raise ValueError("synthetic records have classes; for other tasks give --method trials")
    size = min(build.data.size, 20_000)
    return synthetic_records(tuple(private.shape), private.num_classes, size).to(build.device)


_METHODS: dict[str, Any] = {
    "trials": _by_trials,
    "select": _by_selection,
    "simulate": _by_simulation,
}

search_command = command_of(SearchSettings, search)
