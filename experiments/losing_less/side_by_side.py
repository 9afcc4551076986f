"""Runs in a few processes, each result as soon as it is there, until time is up.

A run that fails is a result that says so; a process that dies takes its own runs with it and is
replaced.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from runs import Setting

Work = Callable[..., dict]


@dataclass(frozen=True)
class Job:
    method: str
    setting: Setting
    seed: int
    held_out: bool = False


def each_result(
    work: Work, jobs: Iterable[Job], arguments: tuple, workers: int, ends: float
) -> Iterator[tuple[Job, dict]]:
    """(job, work(job, *arguments)) as they are done; no job begins after `ends`.

    Jobs are asked for one at a time, so that they may depend on results so far. With one worker
    all happens here.
    """
    todo = iter(jobs)
    if workers == 1:
        while time.perf_counter() < ends and (job := next(todo, None)) is not None:
            try:
                found = work(job, *arguments)
            except Exception as error:
                found = {"seed": job.seed, "error": repr(error)[:500]}
            yield job, found
        return
    pool = _pool(workers)
    running: dict[Future, Job] = {}
    try:
        while True:
            while len(running) < workers and time.perf_counter() < ends:
                job = next(todo, None)
                if job is None:
                    break
                running[pool.submit(work, job, *arguments)] = job
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            broken = False
            for future in done:
                job, error = running.pop(future), future.exception()
                if error is None:
                    yield job, future.result()
                    continue
                broken = broken or isinstance(error, BrokenProcessPool)
                yield job, {"seed": job.seed, "error": repr(error)[:500]}
            if broken:
                for job in running.values():
                    yield job, {"seed": job.seed, "error": "its process ended with another's"}
                running.clear()
                pool.shutdown(wait=False, cancel_futures=True)
                pool = _pool(workers)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
