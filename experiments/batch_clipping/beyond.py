"""Beyond the paper: batch clipping at its best at ε = 3 and 8, beside individual clipping.

One network per dataset: with BatchNorm under batch and general batch clipping (k sets of s
records), with GroupNorm under per-sample clipping. δ = 1e-5, replace-one, exact PLD, batches
without replacement, noise calibrated for the steps. Learning rates are chosen on public records
(`--search`), which are a tenth of the training data and not the test records.

    python -m experiments.batch_clipping beyond --search --epsilons 3 --out results/
    python -m experiments.batch_clipping beyond --chosen results/search.json --out results/
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

import tacit
from experiments.batch_clipping.training import DATA, Setting, sampler_of
from experiments.results import DELTA
from experiments.runner import SHARED, Figure, Paper, command, run_figure, some_of

RECORDS = {"lenet5": 54_000, "convnet": 45_000}
BASE = Setting(augment=False, cosine=True, momentum=0.9)
# Method: what differs, the number of steps, and the learning rates to search.
PER_SAMPLE = {"norm": "group", "clipping": "individual", "batch_size": 2048}
SETS_OF_8 = {"clipping": "general", "batch_size": 1024, "sets": 128}
FULL = {"constants": "full", "master": 0.5}
FACTORS = {"constants": "factors", "master": 1.0}
THREE_GROUPS = {"constants": "grouped:3", "master": 0.5}
ALONE, TOGETHER = (0.3, 1.0, 3.0, 10.0), (0.03, 0.1, 0.3, 1.0)
METHODS: dict[str, tuple[dict, int, tuple[float, ...]]] = {
    "per-sample, GroupNorm": (PER_SAMPLE | FULL, 400, ALONE),
    "per-sample, GroupNorm, factors": (PER_SAMPLE | FACTORS, 400, ALONE),
    "sets of 8, BatchNorm": (SETS_OF_8 | FULL, 250, TOGETHER),
    "sets of 8, BatchNorm, factors": (SETS_OF_8 | FACTORS, 250, TOGETHER),
    "sets of 8, BatchNorm, 3 groups": (SETS_OF_8 | THREE_GROUPS, 250, TOGETHER),
    "sets of 4, BatchNorm, factors": (SETS_OF_8 | FACTORS | {"batch_size": 512}, 250, TOGETHER),
    "one set of 1024, BatchNorm, factors": (
        {"clipping": "batch", "batch_size": 1024} | FACTORS,
        2000,
        (0.0003, 0.001, 0.003),
    ),
}


@cache
def noise_for(setting: Setting, steps: int, epsilon: float) -> float:
    """The joint multiplier that fits the budget, from public numbers alone."""
    count = RECORDS[setting.network] // setting.batch_size * setting.batch_size
    records = tacit.Records(torch.zeros(count, 1), public_size=count)
    budget = tacit.Budget(epsilon, DELTA, tacit.Relation.REPLACE_ONE)
    return tacit.calibrate(budget, sampler_of(setting, records, steps), unit=setting.unit)


def setting_of(network: str, method: str, epsilon: float, rate: float) -> Setting:
    differs, steps, _ = METHODS[method]
    bare = replace(BASE, network=network, **differs)
    z = noise_for(bare, steps, epsilon)
    per_epoch = RECORDS[network] // bare.batch_size
    return replace(bare, learning_rate=rate, epochs=steps / per_epoch, noise_multiplier=z)


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
    search = json.loads(path.read_text(encoding="utf-8"))
    for name, row in search["settings"].items():
        task = name.partition(", epsilon")[0]
        score = statistics.mean(r["public_accuracy"] for r in row["runs"])
        best[task] = max(best.get(task, (-1.0, 0.0)), (score, row["setting"]["learning_rate"]))
    return {task: rate for task, (_, rate) in best.items()}


@command(
    {
        **SHARED,
        "--search": {"action": "store_true", "help": "one seed of every rate"},
        "--chosen": {"type": Path, "help": "a search's table; else the rate in the middle"},
        "--networks": some_of(RECORDS),
        "--methods": some_of(METHODS),
        "--epsilons": {"type": float, "nargs": "+", "default": [3.0, 8.0]},
    }
)
def main(paper: Paper, args: argparse.Namespace) -> dict:
    """Beyond the paper: batch clipping beside individual clipping at ε = 3 and 8."""
    chosen = None if args.search else best_rates(args.chosen) if args.chosen else {}
    wanted = settings(args.networks, args.methods, args.epsilons, chosen)
    key, seeds = ("search", [0]) if args.search else ("beyond", args.seeds or [0, 1, 2])
    figure = Figure(f"Beyond the paper: {key}", wanted)
    return run_figure(paper, key, figure, seeds, args)
