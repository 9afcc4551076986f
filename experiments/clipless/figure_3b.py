"""Figures 3b, 14 and 16: accuracy against ε, by dataset and kind of network.

A task is a dataset and pixels (any network), trained (end to end on pixels: no fixed filters),
scattering features, or a network with certificates. Settings are searched on 5,000 training records
that are held out, at ε = 3 (certified: 8, by the mean of the certified accuracies); then seeds
train on all training records and look at the test records once.

    python experiments/clipless/figure_3b.py --search --workers 6 --seconds 300 --out search.jsonl
    python experiments/clipless/figure_3b.py --chosen search.jsonl --workers 6 --epsilons 1 3 8 \\
        --seeds 0 1 2 3 4 --out final.jsonl

Each run is one line of JSON, written when it is done: a job that is killed keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from image_runs import Job
from image_search import Finals, Search, best_of, in_small, summaries
from image_spaces import KNOWN, tasks
from image_workers import each_result

from tacit.report.run_folder import source, to_json


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    asked = _parser().parse_args(arguments)
    before = lines_of(asked.chosen) if asked.chosen else []
    jobs = _searched(asked, before) if asked.search else _final(asked, before)

    def next_job(worker: int) -> Job | None:
        job = jobs.next_job(worker)
        return job if job is None or asked.records is None else in_small(job, asked.records)

    lines = []
    ends = time.perf_counter() + asked.seconds
    results = each_result(next_job, asked.workers, ends, asked.device, asked.records)
    for job, found in results:
        line = {**job.facts(), **found, "source": source()}
        lines.append(line)
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(json.loads(to_json(line)), ensure_ascii=False) + "\n")
        if isinstance(jobs, Search):
            jobs.note(line)
        said = line.get("score", line.get("error"))
        print(job.task, job.setting.model, job.seed, said, flush=True)
    show(summaries(lines))
    return lines


def _searched(asked: argparse.Namespace, before: Sequence[dict]) -> Search:
    epsilon = asked.epsilons[0] if asked.epsilons else None
    rng = random.Random(asked.seeds[0])
    search = Search(asked.tasks, asked.trials, asked.seconds, asked.workers, epsilon, rng)
    for line in before:
        if line["held_out"] and line["task"] in asked.tasks:
            search.note(line)
    return search


def _final(asked: argparse.Namespace, before: Sequence[dict]) -> Finals:
    """What a search has chosen; without one, what is known to work."""
    best = best_of(before) if asked.chosen else {task: KNOWN[task][0] for task in asked.tasks}
    for task in asked.tasks:
        if task not in best:
            print(f"{asked.chosen} holds no trial of {task}, which is left out")
    settings = {task: best[task] for task in asked.tasks if task in best}
    return Finals(settings, asked.epsilons, asked.seeds, asked.workers)


def show(rows: Sequence[dict]) -> None:
    for row in rows:
        print(
            f"{row['task']}, ε = {row['target_epsilon']:g}, {row['setting']['model']}: "
            f"{100 * row['mean']:.2f} ± {100 * row['std']:.2f} over {len(row['seeds'])} seeds"
        )


def lines_of(path: Path) -> list[dict]:
    """What has been written; a line that a kill has cut short is named and left out."""
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            print(f"{path}: line {number} is cut short and left out")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--search", action="store_true", help="on held-out training records")
    parser.add_argument(
        "--chosen", type=Path, help="a search's file: its best are run, or built on"
    )
    parser.add_argument("--tasks", nargs="+", choices=tasks(), default=tasks())
    parser.add_argument("--epsilons", type=float, nargs="+", help="a search takes the first")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no run begins after")
    parser.add_argument("--trials", type=int, default=400, help="a task, when searching")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="a search takes the first"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--records", type=int, help="use so few records and three steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    return parser


if __name__ == "__main__":
    main()
