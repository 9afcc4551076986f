"""Searches for settings on held-out training records, and runs of the best settings.

The search of a task tries known settings, then random ones, then settings near the best so far, and
ends with repeats of the best. It reads no test record. As usual, it is not charged to ε.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.results import read_lines
from experiments.runner import SHARED, Figure, Job, Options, Paper, job_of, run_figure, run_jobs

Scores = dict[Any, list[float]]  # by setting, one for each time that it was tried


@dataclass(frozen=True)
class Task:
    """What a search of one task tries.

    Args:
        known: settings that are tried first; without a search the first of them is run.
        draw: a random setting of the whole space.
        near: a setting close to a good one.
    """

    known: Sequence[Any]
    draw: Callable[[random.Random], Any]
    near: Callable[[Any, random.Random], Any]


@dataclass(frozen=True)
class Tasks:
    """The tasks of one paper, and how they are searched and run.

    Args:
        read: the task and the setting of a results line.
        group: tasks of one group share their records; a worker stays with a group while it can.
        wide: the share of a search after which settings come from near the best.
        close: the share after which the best are repeated.
        best: how many settings count as the best.
    """

    by_name: Mapping[str, Task]
    read: Callable[[Mapping], tuple[str, Any]]
    group: Callable[[str], str] = lambda task: ""
    wide: float = 0.5
    close: float = 1.0
    best: int = 1

    def scores(self, lines: Iterable[Mapping]) -> dict[str, Scores]:
        """The scores of runs on held-out records, by task and setting."""
        scores: dict[str, Scores] = {}
        for line in lines:
            self.add(line, scores)
        return scores

    def add(self, line: Mapping, scores: dict[str, Scores]) -> None:
        score = line.get("score", line.get("accuracy"))
        if line.get("held_out") and score is not None:
            task, setting = self.read(line)
            scores.setdefault(task, {}).setdefault(setting, []).append(score)

    def chosen(self, lines: Iterable[Mapping]) -> dict[str, Any]:
        """Each task's setting with the best mean score, of those that were repeated if any were.

        The best of many single runs is lucky; one that was repeated is known better.
        """
        return {
            task: max(scores, key=lambda s: (len(scores[s]) > 1, statistics.mean(scores[s])))
            for task, scores in self.scores(lines).items()
        }

    def top(self, scores: Scores) -> list[Any]:
        """The best means, however many runs they are of."""
        return sorted(scores, key=lambda s: statistics.mean(scores[s]), reverse=True)[: self.best]


class Search:
    """Hands out settings to processes, each of which has its own groups of tasks."""

    def __init__(
        self,
        tasks: Tasks,
        names: Sequence[str],
        trials: int,
        seconds: float = math.inf,
        workers: int = 1,
        seed: int = 0,
    ) -> None:
        self.tasks, self.names, self.trials = tasks, names, trials
        self.seconds, self.workers = seconds, workers
        self.rng = random.Random(seed)
        self.started = time.perf_counter()
        self.begun = dict.fromkeys(names, 0)
        self.tried: dict[str, set] = {name: set() for name in names}
        self.scores: dict[str, Scores] = {}
        self.groups = list(dict.fromkeys(map(tasks.group, names)))

    def next(self, worker: int) -> tuple[str, Any, int] | None:
        """A task, a setting, and how many trials of the task came before."""
        left = [name for name in self.names if self.begun[name] < self.trials]
        if not left:
            return None
        home = self._home(worker)
        own = [name for name in left if self.tasks.group(name) == home]
        name = min(own or left, key=self.begun.__getitem__)
        number = self.begun[name]
        self.begun[name] += 1
        return name, self._setting(name, number), number

    def note(self, line: Mapping) -> None:
        """A result, of this search or of an earlier one."""
        task, setting = self.tasks.read(line)
        if task in self.tried:
            self.tried[task].add(setting)
            self.tasks.add(line, self.scores)

    def _setting(self, name: str, number: int) -> Any:
        task, scores = self.tasks.by_name[name], self.scores.get(name, {})
        untried = [setting for setting in task.known if setting not in self.tried[name]]
        if untried:
            self.tried[name].add(untried[0])
            return untried[0]
        drawn, trials = number - len(task.known) + 0.5, max(1, self.trials - len(task.known))
        share = max(drawn / trials, self._share_of_time(name))
        if share < self.tasks.wide or not scores:
            return task.draw(self.rng)
        top = self.tasks.top(scores)
        if share < self.tasks.close:
            return task.near(self.rng.choice(top) if len(top) > 1 else top[0], self.rng)
        return min(top, key=lambda setting: len(scores[setting]))

    def _home(self, worker: int) -> str:
        """The worker's group; with fewer workers than groups, each group gets a share of time."""
        own = self.groups[worker :: self.workers] or [self.groups[worker % len(self.groups)]]
        return own[min(len(own) - 1, int(len(own) * self._elapsed()))]

    def _share_of_time(self, name: str) -> float:
        """The share that has passed of the time of the task's group."""
        group = self.tasks.group(name)
        own = self.groups[self.groups.index(group) % self.workers :: self.workers]
        return len(own) * self._elapsed() - own.index(group)

    def _elapsed(self) -> float:
        return (time.perf_counter() - self.started) / self.seconds


def search_options(trials: int) -> Options:
    return {
        **SHARED,
        "--search": {"action": "store_true", "help": "on held-out training records"},
        "--chosen": {"type": Path, "help": "a search's file: its best are run, or refined"},
        "--trials": {"type": int, "default": trials, "help": "per task, when searching"},
    }


def search_or_run(
    paper: Paper,
    tasks: Tasks,
    names: Sequence[str],
    args: argparse.Namespace,
    key: str,
    figure: Figure,
    settings: Callable[[str, Any], Mapping[str, Any]],
) -> Any:
    """Search these tasks, or run what a search has chosen over seeds, as a figure of this key.

    `settings(task, setting)` are the runs of a task by name; a search does the first of them.
    """
    before = read_lines(args.chosen) if args.chosen else []
    if args.search:
        return _search(paper, tasks, names, args, before, settings)
    best = {name: tasks.by_name[name].known[0] for name in names}
    if args.chosen:
        best = tasks.chosen(before)
        missing = [name for name in names if name not in best]
        if missing:
            print(f"{args.chosen} holds no trial of {', '.join(missing)}")
    runs = {n: s for name in names if name in best for n, s in settings(name, best[name]).items()}
    figure = replace(figure, settings=runs)
    return run_figure(paper, key, figure, args.seeds or (0, 1, 2, 3, 4), args)


def _search(
    paper: Paper,
    tasks: Tasks,
    names: Sequence[str],
    args: argparse.Namespace,
    before: Sequence[Mapping],
    settings: Callable[[str, Any], Mapping[str, Any]],
) -> list[dict]:
    seed = (args.seeds or [0])[0]
    search = Search(tasks, names, args.trials, args.seconds, args.workers, seed)
    for line in before:
        search.note(line)

    def next_job(worker: int) -> Job | None:
        trial = search.next(worker)
        if trial is None:
            return None
        name, setting, number = trial
        run = next(iter(settings(name, setting).values()))
        return job_of(paper, args, "search", name, run, number, held_out=True)

    file = None if args.out is None else args.out / "search.jsonl"
    return run_jobs(paper.work, next_job, args, file, search.note)


# --- spaces -------------------------------------------------------------------------------------

Space = Mapping[str, tuple[float, float] | list]  # (low, high), or a list of choices


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def drawn_from(space: Space, rng: random.Random) -> dict[str, Any]:
    """A pair is drawn on a logarithmic scale, an entry of a list evenly."""
    return {
        name: log_uniform(rng, *values) if isinstance(values, tuple) else rng.choice(values)
        for name, values in space.items()
    }
