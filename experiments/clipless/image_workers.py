"""Processes side by side, each asking for the next job when it is free.

A process keeps to one group of jobs (a dataset and its features) for as long as it can, since
another group's records would have to be loaded first.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from image_runs import Job, work

NextJob = Callable[[int], Job | None]


def each_result(
    next_job: NextJob, workers: int, ends: float, device: str, limit: int | None
) -> Iterator[tuple[Job, dict]]:
    """(job, what came of it), as each is done; nothing begins after `ends`.

    `next_job(i)` is what process i is to do. An error is a result. One worker is this process.
    """
    if workers == 1:
        while time.perf_counter() < ends and (job := next_job(0)) is not None:
            yield job, _in_words(work, job, device, limit)
        return
    processes = [_process() for _ in range(workers)]
    running: dict[Future, tuple[int, Job]] = {}
    free = set(range(workers))
    try:
        while True:
            for i in sorted(free):
                if time.perf_counter() < ends and (job := next_job(i)) is not None:
                    running[processes[i].submit(_in_words, work, job, device, limit)] = (i, job)
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


def _in_words(run: Callable[..., dict], job: Job, device: str, limit: int | None) -> dict:
    try:
        return run(job, device, limit)
    except Exception as error:
        return {"error": repr(error)[:500]}
