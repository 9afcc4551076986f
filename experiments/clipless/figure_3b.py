"""Figures 3b, 14 and 16: accuracy against ε, by dataset and kind of network.

Each task is a dataset, a kind of network and the ε it is searched and reported at:

    python experiments/clipless/figure_3b.py --task fashion-mnist/pixels --epsilons 3 --seeds 5
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from image_runs import Setting, final, loaded, search

MODELS = {
    "mnist/pixels": ["mlp:512", "mlp:1024", "convolution:7:3:64:2", "convolution:5:2:64:2"],
    "fashion-mnist/pixels": ["mlp:512", "mlp:1024", "mlp:512:256"],
    "cifar10/pixels": ["convolution:6:2:128:2", "convolution:6:3:256:3", "convolution:8:2:128:4"],
    "cifar10/certified": ["patches:4:96", "patches:4:192", "mixer:4:128", "mlp:512"],
    "mnist/certified": ["mlp:512", "patches:7:256", "mixer:4:128"],
    "mnist/scattering": ["linear"],
    "fashion-mnist/scattering": ["linear"],
    "cifar10/scattering": ["linear"],
}


def drawn_from(task: str) -> Callable[[random.Random], Setting]:
    def draw(rng: random.Random) -> Setting:
        def log_uniform(low: float, high: float) -> float:
            return math.exp(rng.uniform(math.log(low), math.log(high)))

        scattering = task.endswith("scattering")
        model = rng.choice(MODELS[task])
        heavy = model.startswith("convolution") and task.startswith("cifar10")
        return Setting(
            model=model,
            batch_size=8192 if heavy else rng.choice([8192, 16384]),
            steps=rng.choice([100, 200] if not heavy else [100]),
            scale=log_uniform(5, 100) if scattering else log_uniform(20, 100),
            clip=rng.choice([0.05, 0.1, 0.2, 0.4]),
            learning_rate=log_uniform(0.3, 20) if scattering else log_uniform(0.5, 8),
            ema=rng.choice([None, 0.9]) if scattering else None,
        )

    return draw


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=MODELS, required=True)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[3.0], help="search at first")
    parser.add_argument("--seconds", type=float, default=math.inf, help="to search")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--records", type=int, help="use so few training records, for a test")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    dataset, kind = options.task.split("/")
    train, test = loaded(dataset, kind == "scattering", options.device, options.records)
    draw = drawn_from(options.task)
    if options.records:
        draw = in_small(draw, options.records)
    found = search(
        train,
        options.epsilons[0],
        draw,
        seconds=options.seconds,
        trials=options.trials,
    )
    report = {
        "task": options.task,
        "trials": [{"held_out": score, **asdict(setting)} for score, setting in found],
        "final": [],
    }
    certify = kind == "certified" or found[0][1].model.startswith("mlp")
    for epsilon in options.epsilons:
        row = final(found[0][1], train, test, epsilon, options.seeds, certify)
        report["final"].append(row)
        print(options.task, json.dumps(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=2) + "\n")
    return report


def in_small(draw: Callable[[random.Random], Setting], records: int) -> Callable[..., Setting]:
    return lambda rng: replace(draw(rng), batch_size=records // 4, steps=3)


if __name__ == "__main__":
    main()
