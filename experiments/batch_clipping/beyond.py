"""Beyond the paper: batch clipping at its best at ε = 3 and 8, beside individual clipping.

One network per dataset: with BatchNorm under batch and general batch clipping (k sets of s
records), with GroupNorm under per-sample clipping. δ = 1e-5, replace-one, exact PLD, batches
without replacement, noise calibrated for the steps. Learning rates are chosen on public records
(`--search`), which are a tenth of the training data and not the test records.

    python -m experiments.batch_clipping beyond --search --epsilons 3 --out results/
    python -m experiments.batch_clipping beyond --chosen results/search.json --out results/
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import tacit
from experiments.batch_clipping.training import DATA, PAPER, Setting
from experiments.runner import DELTA, Figure, Selection, jobs_of, options, run_all
from tacit.sampling.scheme import Unit

RECORDS = {"lenet5": 54_000, "convnet": 45_000}
BASE = Setting(augment=False, cosine=True, momentum=0.9)
# Method: what differs, the number of steps, and the learning rates to search.
METHODS: dict[str, tuple[dict, int, tuple[float, ...]]] = {
    "per-sample, GroupNorm": (
        {"norm": "group", "clipping": "individual", "constants": "full", "batch_size": 2048,
         "master": 0.5}, 400, (0.3, 1.0, 3.0, 10.0),
    ),
    "per-sample, GroupNorm, factors": (
        {"norm": "group", "clipping": "individual", "constants": "factors", "batch_size": 2048,
         "master": 1.0}, 400, (0.3, 1.0, 3.0, 10.0),
    ),
    "sets of 8, BatchNorm": (
        {"clipping": "general", "constants": "full", "batch_size": 1024, "sets": 128,
         "master": 0.5}, 250, (0.03, 0.1, 0.3, 1.0),
    ),
    "sets of 8, BatchNorm, factors": (
        {"clipping": "general", "constants": "factors", "batch_size": 1024, "sets": 128,
         "master": 1.0}, 250, (0.03, 0.1, 0.3, 1.0),
    ),
    "sets of 8, BatchNorm, 3 groups": (
        {"clipping": "general", "constants": "grouped:3", "batch_size": 1024, "sets": 128,
         "master": 0.5}, 250, (0.03, 0.1, 0.3, 1.0),
    ),
    "sets of 4, BatchNorm, factors": (
        {"clipping": "general", "constants": "factors", "batch_size": 512, "sets": 128,
         "master": 1.0}, 250, (0.03, 0.1, 0.3, 1.0),
    ),
    "one set of 1024, BatchNorm, factors": (
        {"clipping": "batch", "constants": "factors", "batch_size": 1024, "master": 1.0},
        2000, (0.0003, 0.001, 0.003),
    ),
}  # fmt: skip


@cache
def noise_for(setting: Setting, steps: int, epsilon: float) -> float:
    """The joint multiplier that fits the budget, from public numbers alone."""
    count = RECORDS[setting.network] // setting.batch_size * setting.batch_size
    if setting.clipping == "individual":
        scheme: tacit.sampling.Scheme = tacit.sampling.WithoutReplacement(count, setting.batch_size)
        unit = Unit.RECORD
    else:
        chosen = setting.sets if setting.clipping == "general" else 1
        scheme = tacit.sampling.MiniSets(count // setting.set_size, setting.set_size, chosen=chosen)
        unit = Unit.MINI_SET
    budget = tacit.Budget(epsilon, DELTA, tacit.Relation.REPLACE_ONE)
    return tacit.calibrate(budget, scheme, steps, unit=unit)


def setting_of(network: str, method: str, epsilon: float, rate: float) -> Setting:
    differs, steps, _ = METHODS[method]
    bare = replace(BASE, network=network, learning_rate=rate, **differs)
    count = RECORDS[network] // bare.batch_size * bare.batch_size
    per_epoch = count // bare.batch_size
    z = noise_for(replace(bare, learning_rate=0.0), steps, epsilon)
    return replace(bare, epochs=steps / per_epoch, noise_multiplier=z)


def settings(
    networks: Sequence[str],
    methods: Sequence[str],
    epsilons: Sequence[float],
    chosen: Mapping[str, float] | None,
) -> dict[str, Setting]:
    """By name; without chosen rates, one for each rate that is searched."""
    wanted = {}
    for network in networks:
        for method in methods:
            rates = METHODS[method][2]
            for epsilon in epsilons:
                task = f"{DATA[network]}, {method}"
                for rate in rates if chosen is None else [chosen.get(task, rates[1])]:
                    name = f"{task}, epsilon {epsilon:g}, rate {rate:g}"
                    wanted[name] = setting_of(network, method, epsilon, rate)
    return wanted


def best_rates(path: Path) -> dict[str, float]:
    """The rate with the best accuracy on public records, for each dataset and method."""
    best: dict[str, tuple[float, float]] = {}
    found = json.loads(path.read_text(encoding="utf-8"))
    for name, row in found["settings"].items():
        task = name.partition(", epsilon")[0]
        score = statistics.mean(r["public_accuracy"] for r in row["runs"])
        best[task] = max(best.get(task, (-1.0, 0.0)), (score, row["setting"]["learning_rate"]))
    return {task: rate for task, (_, rate) in best.items()}


def main(arguments: Sequence[str] | None = None) -> dict:
    """Beyond the paper: BatchNorm under batch clipping at ε = 3 and 8."""
    parser = options("Beyond the paper: batch clipping beside individual clipping at ε = 3 and 8")
    parser.add_argument("--search", action="store_true", help="one seed of every rate")
    parser.add_argument("--chosen", type=Path, help="a search's table; else the rate in the middle")
    parser.add_argument("--networks", nargs="+", default=list(RECORDS), choices=list(RECORDS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=[3.0, 8.0])
    asked = parser.parse_args(arguments)
    chosen = None if asked.search else best_rates(asked.chosen) if asked.chosen else {}
    wanted = settings(asked.networks, asked.methods, asked.epsilons, chosen)
    key, seeds = ("search", [0]) if asked.search else ("beyond", asked.seeds or [0, 1, 2])
    figure = Figure(f"Beyond the paper: {key}", wanted)
    jobs = jobs_of(PAPER, Selection(key, seeds), asked, figure)
    return run_all(PAPER, {key: figure}, jobs, asked)
