"""Figures 3, 4, 9, 10 and 15 in order of importance, each result written as soon as it is there.

Five seeds for what the paper's text names, one for the sweeps. A second call goes on where the
first was stopped. `--tables` only reads the file and makes one JSON a figure of it.

    python experiments/losing_less/everything.py --workers 3 --seconds 500 --out runs.jsonl
    python experiments/losing_less/everything.py --out runs.jsonl --tables results/
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import figure
import torch
from beyond import lines_of
from runs import Setting, run
from side_by_side import Job, each_result

from tacit.report.run_folder import environment, to_json

SEEDS = (0, 1, 2, 3, 4)


def jobs_of(number: int, seeds: Sequence[int], *, having: Sequence[str] = ("",)) -> list[Job]:
    """Runs of one figure whose names hold any of the given words."""
    settings: dict[str, Setting] = importlib.import_module(f"figure_{number}").SETTINGS
    wanted = {n: s for n, s in settings.items() if any(word in n for word in having)}
    return [Job(f"{number}: {name}", s, seed) for seed in seeds for name, s in wanted.items()]


def in_order() -> list[Job]:
    return [
        *jobs_of(3, SEEDS, having=["pld", "without"]),
        *jobs_of(4, SEEDS, having=["pld noise, released"]),
        *jobs_of(4, SEEDS, having=["pld"]),
        *jobs_of(3, SEEDS, having=["CIFAR-10, tailored, paper", "CIFAR-10, cross-entropy, paper"]),
        *jobs_of(4, SEEDS, having=["CIFAR-10, tailored, paper", "CIFAR-10, cross-entropy, paper"]),
        *jobs_of(9, [0], having=["sse"]),
        *jobs_of(3, [0], having=["paper"]),
        *jobs_of(4, [0], having=["paper"]),
        *jobs_of(15, [0], having=["Fashion"]),
        *jobs_of(10, [0], having=["Fashion"]),
        *jobs_of(15, [0], having=["CIFAR"]),
        *jobs_of(10, [0], having=["CIFAR"]),
    ]


def work(job: Job, device: str, limit: int | None) -> dict:
    if device == "cpu":
        torch.set_num_threads(1)
    return run(job.setting, job.seed, device, 20, limit)


def tables(lines: Sequence[dict], folder: Path) -> None:
    """figure_N.json: each setting's least, median and largest accuracy, and its runs."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, list[dict]]] = {}
    settings: dict[str, Setting] = {}
    for line in lines:
        if "error" in line:
            print(line["method"], line["seed"], line["error"])
            continue
        number, _, name = line["method"].partition(": ")
        facts = {k: v for k, v in line.items() if k not in ("method", "setting")}
        facts["epsilon"] = float(facts["epsilon"])  # JSON has no infinity
        found.setdefault(number, {}).setdefault(name, []).append(facts)
        settings[line["method"]] = Setting(**line["setting"])
    for number, by_name in found.items():
        results = [(name, one) for name, runs in by_name.items() for one in runs]
        chosen = {name: settings[f"{number}: {name}"] for name in by_name}
        report = figure.collected(f"Figure {number}", chosen, results)
        (folder / f"figure_{number}.json").write_text(to_json(report) + "\n", encoding="utf-8")
        print(figure.table(report))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--tables", type=Path, help="folder; nothing is run")
    parser.add_argument("--figures", type=int, nargs="+", default=None)
    parser.add_argument("--having", default="", help="a word in the settings' names")
    parser.add_argument("--workers", type=int, default=1, help="few, unless they share the GPU")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no run begins after")
    parser.add_argument("--small", action="store_true", help="96 records, three steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(arguments)
    lines = lines_of(asked.out) if asked.out.exists() else []
    if asked.tables is not None:
        tables(lines, asked.tables)
        return
    done = {(line["method"], line["seed"]) for line in lines if "error" not in line}
    jobs, seen = [], set(done)
    for job in in_order():
        named = asked.figures is None or int(job.method.partition(":")[0]) in asked.figures
        if named and asked.having in job.method and (job.method, job.seed) not in seen:
            seen.add((job.method, job.seed))
            jobs.append(job)
    limit = None
    if asked.small:
        limit = figure.SMALL_RECORDS
        jobs = [Job(j.method, figure.small(j.setting), j.seed) for j in jobs]
    ends = time.perf_counter() + asked.seconds
    for job, found in each_result(work, jobs, (asked.device, limit), asked.workers, ends):
        line = {"method": job.method, "setting": asdict(job.setting), **found}
        line["environment"] = environment()
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(json.loads(to_json(line))) + "\n")
        print(job.method, job.seed, line.get("accuracy", line.get("error")), flush=True)


if __name__ == "__main__":
    main()
