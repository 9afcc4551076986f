"""Which setting is tried next, and which is the best so far: on held-out training records alone.

The search is not charged for, as is usual.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from image_runs import Job
from image_settings import Setting, default_epsilon
from image_spaces import KNOWN, drawn, near

WIDE, CLOSE = 0.45, 0.8  # shares of a search: drawn at large, then near the best, then repeats
BEST = 4


def group_of(task: str) -> str:
    """Tasks on the same records: pixels serve certified ones too."""
    dataset, kind = task.split("/")
    return f"{dataset}/{'scattering' if kind == 'scattering' else 'pixels'}"


@dataclass
class Found:
    """Scores by setting, over its seeds."""

    scores: dict[Setting, list[float]] = field(default_factory=dict)

    def add(self, setting: Setting, score: float) -> None:
        self.scores.setdefault(setting, []).append(score)

    def ranked(self) -> list[Setting]:
        """The best mean first, and what was run more than once before what was run once.

        The best of many single runs is lucky; one that was repeated is known better.
        """

        def merit(setting: Setting) -> tuple[bool, float]:
            scores = self.scores[setting]
            return len(scores) > 1, statistics.mean(scores)

        return sorted(self.scores, key=merit, reverse=True)

    def top(self) -> list[Setting]:
        """The best means, however many runs they are of."""
        order = sorted(self.scores, key=lambda s: statistics.mean(self.scores[s]), reverse=True)
        return order[:BEST]


@dataclass
class Search:
    """Hands out trials to processes, each of which has its own groups of tasks."""

    tasks: Sequence[str]
    trials: int
    seconds: float
    workers: int
    epsilon: float | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.begun = dict.fromkeys(self.tasks, 0)
        self.found = {task: Found() for task in self.tasks}
        self.given: dict[str, set[Setting]] = {task: set() for task in self.tasks}
        self.groups = list(dict.fromkeys(group_of(task) for task in self.tasks))

    def next_job(self, worker: int) -> Job | None:
        left = [task for task in self.tasks if self.begun[task] < self.trials]
        if not left:
            return None
        home = self.home(worker)
        own = [task for task in left if group_of(task) == home]
        task = min(own or left, key=lambda name: self.begun[name])
        number = self.begun[task]
        self.begun[task] += 1
        epsilon = self.epsilon or default_epsilon(task)
        return Job(task, self.setting(task, number), epsilon, seed=number, held_out=True)

    def home(self, worker: int) -> str:
        """Its only group, or, with fewer processes than groups, the one whose time it is."""
        own = self.groups[worker :: self.workers] or [self.groups[worker % len(self.groups)]]
        return own[min(len(own) - 1, int(len(own) * self.elapsed()))]

    def elapsed(self) -> float:
        return (time.perf_counter() - self.started) / self.seconds

    def setting(self, task: str, number: int) -> Setting:
        found = self.found[task]
        share = max(number / self.trials, self._share_of_time(task))
        untried = [setting for setting in KNOWN[task] if setting not in self.given[task]]
        if untried:
            self.given[task].add(untried[0])
            return untried[0]
        if share < WIDE or not found.scores:
            return drawn(task, self.rng)
        if share < CLOSE:
            return near(task, self.rng.choice(found.top()), self.rng)
        return min(found.top(), key=lambda setting: len(found.scores[setting]))

    def _share_of_time(self, task: str) -> float:
        """Of the time that the task's group has: all of it, or its slot."""
        group = group_of(task)
        own = self.groups[self.groups.index(group) % self.workers :: self.workers]
        return len(own) * self.elapsed() - own.index(group)

    def note(self, line: Mapping) -> None:
        setting = Setting(**line["setting"])
        self.given[line["task"]].add(setting)
        if "score" in line:
            self.found[line["task"]].add(setting, line["score"])


def best_of(lines: Iterable[Mapping]) -> dict[str, Setting]:
    """Each task's setting with the best score on held-out records."""
    found: dict[str, Found] = {}
    for line in lines:
        if line.get("held_out") and "score" in line:
            task = found.setdefault(line["task"], Found())
            task.add(Setting(**line["setting"]), line["score"])
    return {task: scores.ranked()[0] for task, scores in found.items()}


class Finals:
    """Every task at every ε, seed by seed, with one setting for all."""

    def __init__(
        self,
        chosen: Mapping[str, Setting],
        epsilons: Sequence[float] | None,
        seeds: Sequence[int],
        workers: int,
    ) -> None:
        self.jobs = [
            Job(task, setting, epsilon, seed, held_out=False)
            for task, setting in chosen.items()
            for epsilon in epsilons or [default_epsilon(task)]
            for seed in seeds
        ]
        groups = list(dict.fromkeys(group_of(job.task) for job in self.jobs))
        self.homes = {i: groups[i % len(groups)] for i in range(workers)} if groups else {}

    def next_job(self, worker: int) -> Job | None:
        if not self.jobs:
            return None
        home = self.homes[worker]
        at = next((i for i, job in enumerate(self.jobs) if group_of(job.task) == home), 0)
        self.homes[worker] = group_of(self.jobs[at].task)
        return self.jobs.pop(at)


def summaries(lines: Iterable[Mapping]) -> list[dict]:
    """Mean and standard deviation over seeds, by task and ε."""
    rows: dict[tuple[str, float], list[Mapping]] = {}
    for line in lines:
        if not line["held_out"] and "accuracy" in line:
            rows.setdefault((line["task"], line["target_epsilon"]), []).append(line)
    return [_summary(task, epsilon, found) for (task, epsilon), found in rows.items()]


def _summary(task: str, epsilon: float, lines: Sequence[Mapping]) -> dict:
    radii = lines[0].get("certified", {})
    certified = {radius: [line["certified"][radius] for line in lines] for radius in radii}
    mean, std = _spread([line["accuracy"] for line in lines])
    return {
        "task": task,
        "target_epsilon": epsilon,
        "epsilon": max(line["epsilon"] for line in lines),
        "mean": mean,
        "std": std,
        "certified": {radius: _spread(shares) for radius, shares in certified.items()},
        "seeds": [line["seed"] for line in lines],
        "seconds": statistics.median(line["seconds"] for line in lines),
        "setting": lines[0]["setting"],
    }


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def in_small(job: Job, records: int) -> Job:
    """For a rehearsal: few records, three steps."""
    few = {**asdict(job.setting), "batch_size": records // 4, "steps": 3}
    return Job(job.task, Setting(**few), job.epsilon, job.seed, job.held_out)
