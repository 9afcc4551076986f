"""The runner of all experiments: their command line, and their jobs in parallel.

A `Paper` is its figures as data and one function that does one run. With `--out DIR` every run
becomes a line of DIR/runs.jsonl as soon as it is done, so a job that is killed keeps its results
and a second call runs only what is missing. DIR/figure_N.json then holds all runs of a figure with
their summary, and DIR/figure_N.png its picture, which `--plot-only DIR` draws again.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import torch

import tacit
from experiments.results import (
    DELTA,
    append,
    collected,
    file_stem,
    plain,
    read_lines,
    table,
    write,
)
from tacit.report.run_folder import source

Draw = Callable[[Mapping, Path], None]
Options = Mapping[str, Mapping[str, Any]]  # by name, what `argparse` is told of each


@dataclass(frozen=True)
class Figure:
    """One figure or table: its runs by name.

    Args:
        note: what the paper reports, and what differs here.
        draw: draws the collected results; without one, the paper's usual picture is drawn.
        measures: names of what a run measures besides accuracy.
        held_out: accuracy is on held-out training records instead of the test records.
        conclude: facts to add to the collected results.
    """

    title: str
    settings: Mapping[str, Any]
    note: str = ""
    draw: Draw | None = None
    measures: tuple[str, ...] = ()
    held_out: bool = False
    conclude: Callable[[dict], dict] | None = None


@dataclass(frozen=True)
class Job:
    """One run: everything that a worker process needs to know."""

    figure: str
    name: str
    setting: Any
    seed: int
    held_out: bool = False
    measures: tuple[str, ...] = ()
    device: str = "cpu"
    evaluations: int = 1
    limit: int | None = None

    def facts(self) -> dict[str, Any]:
        names = ("figure", "name", "seed", "held_out")
        return {n: getattr(self, n) for n in names} | {"setting": asdict(self.setting)}


@dataclass(frozen=True)
class Selection:
    """Runs of one figure: the settings whose names contain one of `only`, with `changes`."""

    figure: str
    seeds: Sequence[int] = (0,)
    only: Sequence[str] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Paper:
    """A paper's figures, and how one run of them is done.

    Args:
        work: does one job; returns its results, with `accuracy` and `epsilon`.
        small: turns a setting into one that runs in seconds.
        draw: the usual picture of a figure.
        everything: what `all` runs, the most important first.
        commands: experiments that have options of their own, by name.
        small_records: how many records `--small` loads.
        group: jobs of one group share their records; a worker stays with a group while it can.
    """

    title: str
    figures: Mapping[str, Figure]
    work: Callable[[Job], dict]
    small: Callable[[Any], Any]
    draw: Draw
    everything: Sequence[Selection] = ()
    commands: Mapping[str, Command] = field(default_factory=dict)
    small_records: int = 96
    evaluations: int = 20
    group: Callable[[Job], str] = lambda job: ""


@dataclass(frozen=True)
class Command:
    """An experiment with options of its own; the docstring of `run` describes it.

    Without `options` it is given the arguments as they are.
    """

    options: Options | None
    run: Callable[[Paper, Any], Any]


def main(paper: Paper, arguments: Sequence[str] | None = None) -> Any:
    """The command line of one paper; returns the collected results by figure."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in paper.commands:
        chosen = paper.commands[arguments[0]]
        if chosen.options is None:
            return chosen.run(paper, arguments[1:])
        parser = parser_of(chosen.run.__doc__, chosen.options)
        return chosen.run(paper, parser.parse_args(arguments[1:]))
    parser = parser_of(paper.title, {**SHARED, **OF_FIGURES})
    args = parser.parse_args(arguments)
    unknown = set(args.figures) - {*paper.figures, "all"}
    if unknown:
        known = ", ".join([*paper.figures, "all", *paper.commands])
        parser.error(f"there is no figure {', '.join(sorted(unknown))}; there are {known}")
    if args.plot_only is not None:
        return plot_again(paper, args.figures or list(paper.figures), args.plot_only, args.out)
    if args.list or not args.figures:
        print(listing(paper, args.figures))
        return {}
    if "all" in args.figures and (args.only or args.set):
        parser.error("--only and --set go with figures, and all has its own selection")
    selections = [replace(s, seeds=args.seeds or s.seeds) for s in paper.everything]
    try:
        if "all" not in args.figures:
            changes = dict(_assignment(text) for text in args.set)
            seeds = args.seeds or [0]
            selections = [Selection(key, seeds, args.only, changes) for key in args.figures]
        jobs = [
            job
            for selection in selections
            for job in jobs_of(paper, paper.figures[selection.figure], selection, args)
        ]
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    return run_all(paper, paper.figures, jobs, args)


SHARED: Options = {
    "--small": {"action": "store_true", "help": "few records and steps: a rehearsal"},
    "--seeds": {"type": int, "nargs": "+"},
    "--out": {"type": Path, "metavar": "DIR", "help": "folder of results"},
    "--workers": {"type": int, "default": 1, "help": "processes; few share a GPU well"},
    "--seconds": {"type": float, "default": math.inf, "help": "start no run after this"},
    "--evaluations": {"type": int, "help": "points along each curve"},
    "--device": {"default": "cuda" if torch.cuda.is_available() else "cpu"},
}
OF_FIGURES: Options = {
    "figures": {"nargs": "*", "metavar": "FIGURE", "help": "3, table_6, ... or all"},
    "--list": {"action": "store_true", "help": "list figures and their settings"},
    "--only": {"nargs": "+", "default": [], "help": "settings whose names contain this"},
    "--set": {"nargs": "+", "default": [], "metavar": "FIELD=VALUE", "help": "change runs"},
    "--plot-only": {"type": Path, "metavar": "DIR", "help": "draw saved results again"},
}


def parser_of(description: str | None, options: Options) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    for name, given in options.items():
        parser.add_argument(name, **given)
    return parser


def command(options: Options) -> Callable[[Callable[[Paper, argparse.Namespace], Any]], Command]:
    return functools.partial(Command, options)


def shared(*names: str) -> Options:
    return {name: SHARED[name] for name in names}


def some_of(choices: Collection[str]) -> Mapping[str, Any]:
    """An option that takes some of the choices, by default all of them."""
    return {"nargs": "+", "choices": choices, "default": list(choices)}


def listing(paper: Paper, wanted: Sequence[str] = ()) -> str:
    """The paper's figures; with names, also their notes and settings."""
    lines = [paper.title]
    for key, figure in paper.figures.items():
        if wanted and key not in wanted:
            continue
        lines.append(f"  {key:10} {figure.title} ({len(figure.settings)} settings)")
        if wanted:
            lines += [f"             {figure.note}"] if figure.note else []
            lines += [f"             - {name}" for name in figure.settings]
    if not wanted:
        for name, chosen in paper.commands.items():
            lines.append(f"  {name:10} {(chosen.run.__doc__ or '').splitlines()[0]}")
    return "\n".join(lines)


def _assignment(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def jobs_of(
    paper: Paper, figure: Figure, selection: Selection, args: argparse.Namespace
) -> list[Job]:
    """The selected runs of a figure, seed by seed."""
    wanted = matching(figure.settings, selection.only)
    if selection.changes:
        changed = ", ".join(f"{field} = {value}" for field, value in selection.changes.items())
        wanted = {f"{n}, {changed}": replace(s, **selection.changes) for n, s in wanted.items()}
    common = {
        "held_out": figure.held_out,
        "measures": figure.measures,
        "evaluations": args.evaluations or paper.evaluations,
    }
    return [
        job_of(paper, args, selection.figure, name, setting, seed, **common)
        for seed in selection.seeds
        for name, setting in wanted.items()
    ]


def job_of(
    paper: Paper, args: argparse.Namespace, figure: str, name: str, setting: Any, seed: int,
    **more: Any,
) -> Job:  # fmt: skip
    """One run on the device that was asked for; with `--small`, a rehearsal of it."""
    limit = paper.small_records if args.small else None
    setting = paper.small(setting) if args.small else setting
    return Job(figure, name, setting, seed, device=args.device, limit=limit, **more)


def matching(settings: Mapping[str, Any], only: Sequence[str]) -> dict[str, Any]:
    """Settings that are named exactly so, or else whose names contain one of the words."""
    wanted: set[str] = set()
    for word in only:
        names = [word] if word in settings else [name for name in settings if word in name]
        if not names:
            raise ValueError(f"there is no setting {word!r}; there are {list(settings)}")
        wanted |= set(names)
    return {name: s for name, s in settings.items() if not only or name in wanted}


# --- running ------------------------------------------------------------------------------------


def run_figure(
    paper: Paper, key: str, figure: Figure, seeds: Sequence[int], args: argparse.Namespace
) -> dict[str, dict]:
    """Run a figure that is not among the paper's own."""
    jobs = jobs_of(paper, figure, Selection(key, seeds), args)
    return run_all(paper, {key: figure}, jobs, args)


def run_all(
    paper: Paper, figures: Mapping[str, Figure], jobs: Iterable[Job], args: argparse.Namespace
) -> dict[str, dict]:
    """Run the jobs whose results are not in the folder yet, then collect all that are there."""
    prefix = "small_" if args.small else ""
    file = None if args.out is None else args.out / f"{prefix}runs.jsonl"
    lines = read_lines(file) if file is not None and file.exists() else []
    done = {_identity(line) for line in lines if "error" not in line}
    todo: dict[tuple, Job] = {}
    for job in jobs:
        identity = _identity(plain(job.facts()))
        if identity not in done:
            todo.setdefault(identity, job)
    lines += run_jobs(paper.work, in_groups(list(todo.values()), paper.group), args, file)
    reports = {}
    for key in dict.fromkeys(line["figure"] for line in lines if line["figure"] in figures):
        figure = figures[key]
        report = collected(figure.title, [line for line in lines if line["figure"] == key])
        if not report["settings"]:
            continue
        print(table(report))
        if figure.conclude is not None:
            concluded = figure.conclude(report)
            print(json.dumps(concluded, indent=2, ensure_ascii=False))
            report |= concluded
        reports[key] = report
        if args.out is not None:
            stem = prefix + file_stem(key)
            write(args.out / f"{stem}.json", report)
            (figure.draw or paper.draw)(report, args.out / f"{stem}.png")
    return reports


def run_jobs(
    work: Callable[[Job], dict],
    next_job: Callable[[int], Job | None],
    args: argparse.Namespace,
    file: Path | None,
    note: Callable[[dict], None] | None = None,
) -> list[dict]:
    """Every job's line, appended to the file as soon as it is done; `note` is told of each."""
    lines = []
    ends = time.perf_counter() + args.seconds
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    for job, result in each_result(work, next_job, args.workers, ends):
        line = plain({**job.facts(), **result, "source": source()})
        lines.append(line)
        if file is not None:
            append(file, json.dumps(line, ensure_ascii=False))
        if note is not None:
            note(line)
        score = line.get("score", line.get("accuracy", line.get("error")))
        print(f"{job.figure}: {job.name}, seed {job.seed}: {score}", flush=True)
    return lines


def in_groups(jobs: list[Job], group: Callable[[Job], str]) -> Callable[[int], Job | None]:
    """Hands out jobs in order; each worker first those of the group that it is in."""
    current: dict[int, str] = {}
    groups = list(dict.fromkeys(map(group, jobs)))

    def next_job(worker: int) -> Job | None:
        if not jobs:
            return None
        home = current.setdefault(worker, groups[worker % len(groups)])
        at = next((i for i, job in enumerate(jobs) if group(job) == home), 0)
        current[worker] = group(jobs[at])
        return jobs.pop(at)

    return next_job


def each_result(
    work: Callable[[Job], dict],
    next_job: Callable[[int], Job | None],
    workers: int,
    ends: float,
) -> Iterator[tuple[Job, dict]]:
    """(job, its results) as each is done; no job begins after `ends`.

    `next_job(i)` is called when process i is free and returns its next job, so jobs may
    depend on results so far. An error is a result; a process that dies is replaced. One worker is
    this process.
    """
    if workers == 1:
        while time.perf_counter() < ends and (job := next_job(0)) is not None:
            yield job, guarded(work, job)
        return
    processes = [_process() for _ in range(workers)]
    running: dict[Future, tuple[int, Job]] = {}
    free = set(range(workers))
    try:
        while True:
            for i in sorted(free):
                if time.perf_counter() < ends and (job := next_job(i)) is not None:
                    running[processes[i].submit(guarded, work, job)] = (i, job)
                    free.remove(i)
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                i, job = running.pop(done)
                free.add(i)
                died = done.exception()
                if isinstance(died, BrokenProcessPool):
                    processes[i] = _process()
                yield job, done.result() if died is None else {"error": repr(died)[:500]}
    finally:
        for process in processes:
            process.shutdown(wait=False, cancel_futures=True)


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def guarded(work: Callable[[Job], dict], job: Job) -> dict:
    """The job's results, or its error in words; memory of recorded steps is given back."""
    if job.device == "cpu":
        torch.set_num_threads(1)
    try:
        return work(job)
    except Exception as error:
        return {"error": repr(error)[:500]}
    finally:
        gc.collect()  # a scheduler and its optimizer refer to each other, and hold recorded graphs
        if job.device != "cpu":
            torch.cuda.empty_cache()


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


@functools.cache
def least_noise(
    sampling_rate: float,
    steps: int,
    epsilon: float,
    prelude: tuple[dpa.DpEvent, ...] = (),
    delta: float = DELTA,
) -> float:
    """The least multiplier that keeps `prelude` and so many Poisson steps within ε, by PLD."""
    scheme = tacit.sampling.Poisson(sampling_rate)
    return tacit.calibrate(tacit.Budget(epsilon, delta), scheme, steps, prelude=prelude)


def _identity(line: Mapping) -> tuple:
    return line["figure"], line["name"], line["seed"], json.dumps(line["setting"], sort_keys=True)


def plot_again(
    paper: Paper, keys: Sequence[str], folder: Path, out: Path | None = None
) -> dict[str, dict]:
    """Draw the pictures of figures whose results are in the folder."""
    reports = {}
    for key in keys:
        for stem in (file_stem(key), f"small_{file_stem(key)}"):
            file = folder / f"{stem}.json"
            if key not in paper.figures or not file.exists():
                continue
            report = json.loads(file.read_text(encoding="utf-8"))
            target = (out or folder) / f"{stem}.png"
            (paper.figures[key].draw or paper.draw)(report, target)
            reports[key] = report
            print(target)
    return reports
