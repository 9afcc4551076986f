"""What does it cost to search for settings, if the search is charged?

For each dataset and seed, with one total ε and 50 trials:

    defaults    no search: the settings that `tacit train` starts from
    uncharged   50 full runs, each scored without noise on held-out training records; the best
                settings are trained once more, and the ε of that run alone is printed, as is usual
    trials      cheap noisy trials and one full run, composed (`TrialSearch`)
    at-1.3      the same with 1.3 times the total, so that the final run has the whole ε
    select      the best of a secret number of full runs, 50 expected (`select_best`)
    simulate    50 runs on synthetic records, and one run on the private ones

Settings are the learning rate and the clipping norm, of the network and recipe of `tacit train`.
Accuracy and AUROC are of the test records, which no arm looks at before the end. Jobs run in
processes of their own, and each writes a line of results.jsonl when it is done.

    python benchmarks/charged_search.py --datasets adbench/magic.gamma --seeds 2 --out results.jsonl
    python benchmarks/charged_search.py --summary results.jsonl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ARMS = ("defaults", "uncharged", "trials", "at-1.3", "select", "simulate")
MOMENTUM = 0.9
RARE = ("adbench/campaign",)  # nearly all answers are right there: a bounded loss is the score


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(job["threads"])
    arm = Arm(job)
    began = time.perf_counter()
    ways = {
        "defaults": arm.defaults,
        "uncharged": arm.uncharged,
        "trials": lambda: arm.cheap_trials(job["epsilon"]),
        "at-1.3": lambda: arm.cheap_trials(1.3 * job["epsilon"]),
        "select": arm.select,
        "simulate": arm.simulate,
    }
    told = ways[job["arm"]]()
    return {**job, **told, "seconds": time.perf_counter() - began}


class Arm:
    """One way to a model, on one dataset."""

    def __init__(self, job: dict[str, Any]) -> None:
        import optuna
        import torch

        import tacit
        from tacit.cli import build_model

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        torch.manual_seed(job["seed"])
        self.job, self.trials = job, job["trials"]
        self.device = torch.device(job["device"])
        train, test = tacit.load(job["dataset"], root=job["data"])
        self.train, self.test = train.to(self.device), test.to(self.device)
        self.recipe = build_model.recipe_for(job["dataset"], "clip")
        size = train.require_public_size("a sampling rate")
        batch = min(self.recipe.batch_size, size // 2)
        epochs = job["epochs"] or self.recipe.epochs
        self.rate, self.steps = batch / size, max(1, round(epochs * size / batch))
        self.budget = tacit.Budget(job["epsilon"], job["delta"])
        usual = {"lr": self.recipe.learning_rate, "max_norm": self.recipe.max_norm}
        self.usual = usual
        self.space = {
            name: optuna.distributions.FloatDistribution(value / 10, value * 10, log=True)
            for name, value in usual.items()
        }
        rare = job["dataset"] in RARE
        self.score = tacit.search.BoundedLoss(2.0) if rare else tacit.search.RightAnswers()

    def build(self, settings: Any, stage: Any) -> Any:
        import torch

        import tacit
        from tacit import engines
        from tacit.cli import build_model

        shape, outputs = tuple(self.train.shape), self.train.num_classes
        network, _ = build_model.architecture_for("default", shape, outputs, "clip").build()
        network.to(self.device)
        rate = stage.learning_rate(settings["lr"], MOMENTUM)
        optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=MOMENTUM)
        return tacit.Trainer(
            network,
            tacit.losses.CrossEntropy(self.recipe.temperature),
            tacit.PerSampleClip(settings["max_norm"], engine=engines.BookKeeping()),
            stage.sampler(max_physical_batch=self.job["piece"]),
            optimizer,
            callbacks=(),
            **stage.privacy(),
        )

    def stage(self, records: Any, noise: float | None = None) -> Any:
        from tacit.accounting import Plan, calibrate
        from tacit.sampling import Poisson
        from tacit.search import SearchStage

        scheme = Poisson(self.rate)
        noise = calibrate(self.budget, scheme, self.steps) if noise is None else noise
        plan = Plan(scheme, noise, self.budget.relation, self.steps)
        return SearchStage(records, plan, self.budget)

    def told(self, run: Any, **more: Any) -> dict[str, Any]:
        metrics = run.evaluate(self.test)
        known = {"accuracy": metrics.accuracy, "auroc": metrics.auroc, "total": run.epsilon}
        return {**known, **more, "search": run.search}

    def defaults(self) -> dict[str, Any]:
        return self.told(self.build(self.usual, self.stage(self.train)).fit(), settings=self.usual)

    def uncharged(self) -> dict[str, Any]:
        from tacit.search import audit_search
        from tacit.search.cheap_trials import quiet_study
        from tacit.search.scores import score_sum, split_for_scores

        trained, scored = split_for_scores(self.train, 0.1, self.budget.relation)
        study, stage = quiet_study(), self.stage(trained)
        study.enqueue_trial(self.usual)
        for _ in range(self.trials):
            trial = study.ask(self.space)
            run = self.build(trial.params, stage).fit()
            study.tell(trial, score_sum(run.model, scored, run.loss, self.score) / len(scored))
        ledger = Path(self.job["scratch"]) / f"{self.job['number']}.sqlite"
        ledger.unlink(missing_ok=True)
        trainer = self.build(study.best_params, self.stage(self.train))
        trainer.ledger = ledger
        run = trainer.fit()
        audit = audit_search(run.epsilon, study, ledger)
        return self.told(
            run, settings=study.best_params, owed=audit.epsilon_owed, findings=audit.findings
        )

    def cheap_trials(self, epsilon: float) -> dict[str, Any]:
        import tacit
        from tacit.search import TrialSearch, plan_trials

        budget = tacit.Budget(epsilon, self.budget.delta)
        plan = plan_trials(
            budget,
            self.rate,
            self.steps,
            trials=self.trials,
            overhead=1.3,
            trial_steps=self.job["trial_steps"],
        )
        search = TrialSearch(
            self.build, self.space, self.train, plan, usual=self.usual, score=self.score
        )
        result = search.run()
        trials = [[t.params, t.value] for t in search.study.get_trials()]
        return self.told(result.run, settings=result.settings, trials_run=trials)

    def select(self) -> dict[str, Any]:
        from tacit.search import plan_selection, select_best

        plan = plan_selection(self.budget, self.rate, self.steps, trials=self.trials)
        result = select_best(self.build, self.space, self.train, plan, score=self.score)
        return self.told(result.run, settings=result.settings)

    def simulate(self) -> dict[str, Any]:
        from tacit.search import simulate, synthetic_records

        shape, classes = tuple(self.train.shape), self.train.num_classes
        size = min(self.train.require_public_size("synthetic records"), 20_000)
        public = synthetic_records(shape, classes, size, overlap=1.5).to(self.device)
        result = simulate(
            self.build,
            self.space,
            self.train,
            public,
            self.budget,
            self.rate,
            self.steps,
            trials=self.trials,
            usual=self.usual,
            score=self.score,
        )
        return self.told(result.run, settings=result.settings)


def summary(lines: list[dict[str, Any]]) -> str:
    """A table: means over seeds, and standard deviations where there are several."""
    groups = defaultdict(list)
    for line in lines:
        groups[line["dataset"], line["arm"]].append(line)
    rows = [
        "| dataset | arm | seeds | accuracy | AUROC | total ε | uncharged ε | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for dataset in dict.fromkeys(line["dataset"] for line in lines):
        for arm in ARMS:
            found = groups[dataset, arm]
            if not found:
                continue
            cells = [spread([100 * line["accuracy"] for line in found], "%")]
            areas = [100 * line["auroc"] for line in found if line["auroc"] is not None]
            cells.append(spread(areas, "%"))
            owed = statistics.mean(line.get("owed") or line["total"] for line in found)
            alone = [
                (line["search"] or {}).get("epsilon_uncharged", line["total"]) for line in found
            ]
            cells += [f"{owed:.3g}", f"{statistics.mean(alone):.3g}"]
            cells.append(f"{statistics.mean(line['seconds'] for line in found):.0f}")
            rows.append(f"| {dataset} | {arm} | {len(found)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def spread(values: list[float], unit: str) -> str:
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}{unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", nargs="+", default=["adbench/magic.gamma"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--trial-steps", type=int)
    parser.add_argument("--epochs", type=float, help="instead of the recipe's")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--piece", type=int, default=4096, help="records at once")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", help="folder of the datasets")
    parser.add_argument("--scratch", default="/tmp")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--summary", type=Path, nargs="+")
    options = vars(parser.parse_args())
    files = options.pop("summary")
    if files:
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        print(summary(lines))
        return
    out, workers = options.pop("out"), options.pop("workers")
    datasets, arms = options.pop("datasets"), options.pop("arms")
    first, seeds = options.pop("first_seed"), options.pop("seeds")
    jobs = [
        {**options, "dataset": dataset, "arm": arm, "seed": seed}
        for dataset in datasets
        for arm in sorted(arms, key=lambda arm: arm in ("defaults", "trials", "at-1.3"))
        for seed in range(first, first + seeds)
    ]
    jobs = [{**job, "number": number} for number, job in enumerate(jobs)]
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        out.open("a") as written,
        multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool,
    ):
        for line in pool.imap_unordered(run_job, jobs):
            written.write(json.dumps(line, default=str) + "\n")
            written.flush()
            print(line["dataset"], line["arm"], line["seed"], f"{line['accuracy']:.4f}", flush=True)
    print(summary([json.loads(line) for line in out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
