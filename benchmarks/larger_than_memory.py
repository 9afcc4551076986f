"""What does it cost to train on data that stay on disk?

A sparse file of 20 GiB, 5,242,880 records of 1,024 numbers, of which one in a thousand is not zero.
Whole private steps (Poisson sampling, clipping, noise, ledger on disk, optimizer) of a small
network on the memory-mapped file, against the same steps on the same batches whose rows were
brought into memory beforehand; rounds alternate in one process. Then memory, in a process that only
trains and evaluates on the file.

    python benchmarks/larger_than_memory.py --out result.json

A hole of a sparse file is read without a disk: what is measured is Tacit and the system's page
cache, and not a disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import report, spread
from torch import nn

import tacit

WIDTH, CLASSES, RATE_OF_VALUES = 1024, 10, 1000


def make_file(path: Path, gib: float) -> np.memmap:
    """A sparse file of so many GiB whose every thousandth row holds numbers."""
    rows = int(gib * 2**30) // (4 * WIDTH)
    with path.open("wb") as file:
        file.truncate(rows * 4 * WIDTH)
        for row in range(0, rows, RATE_OF_VALUES):
            file.seek(row * 4 * WIDTH)
            file.write(row_values(row).tobytes())
    return np.memmap(path, np.float32, "r", shape=(rows, WIDTH))


def row_values(row: int) -> np.ndarray:
    return np.random.default_rng(row).standard_normal(WIDTH, dtype=np.float32)


def records_of(array: np.memmap, prefetch: int) -> tacit.Records:
    targets = torch.arange(len(array)) % CLASSES
    return tacit.Records.lazy(
        (array, targets), prefetch=prefetch, num_classes=CLASSES, public_size=len(array)
    )


class InMemory(tacit.PoissonSampler):
    """The batches of a sampler, with their rows in memory."""

    rows: torch.Tensor
    loaded: tacit.Records

    def next_batch(self) -> tacit.Batch:
        batch = super().next_batch()
        places = torch.searchsorted(self.rows, batch.indices)
        return tacit.Batch(
            self.loaded, places, batch.divisor, batch.scheme, epoch=batch.epoch, drawn=batch.drawn
        )


class Training:
    """A model, a sampler and a ledger of their own; `steps` runs one pass of the sampler."""

    def __init__(self, sampler: tacit.PoissonSampler, folder: Path) -> None:
        torch.manual_seed(0)
        self.sampler = sampler
        self.model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        # An engine that compiles nothing, so that all kinds take the same steps, to the last bit.
        query = tacit.PerSampleClip(1.0, engine=tacit.engines.BookKeeping())
        self.mechanism = tacit.Mechanism(query, sampler, 1.0, seed=1)
        self.ledger = tacit.Ledger(folder, tacit.Budget(epsilon=50.0, delta=1e-8))
        self.loss = tacit.losses.CrossEntropy()

    def steps(self) -> Iterator[None]:
        self.ledger.begin(self.mechanism.plan)
        for batch in self.sampler:
            pending = self.mechanism.privatise(self.model, self.loss, batch)
            self.ledger.release(pending, into=self.model)
            self.optimizer.step()
            yield


def seconds(training: Training, warm_up: int) -> tuple[float, float]:
    """The time of a step, and its time of all processors, without the first steps of the pass."""
    started = 0.0, 0.0
    for step, _ in enumerate(training.steps()):
        if step + 1 == warm_up:
            started = time.perf_counter(), time.process_time()
    ended, steps = (time.perf_counter(), time.process_time()), training.sampler.steps - warm_up
    return (ended[0] - started[0]) / steps, (ended[1] - started[1]) / steps


def compare(array: np.memmap, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    how = {"expected_batch_size": given.batch_size, "steps": given.steps, "seed": 3}
    kinds = {"prefetch": 2, "no_prefetch": 0}
    samplers = {k: tacit.PoissonSampler(records_of(array, n), **how) for k, n in kinds.items()}
    samplers["memory"] = InMemory(records_of(array, 0), **how)
    samplers["again"] = InMemory(records_of(array, 0), **how)
    runs = {k: Training(s, folder / f"{k}.sqlite") for k, s in samplers.items()}
    ahead = tacit.PoissonSampler(records_of(array, 0), **how)
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    processor: dict[str, list[float]] = {kind: [] for kind in runs}
    for round_ in range(given.rounds + 1):
        rows = torch.cat([batch.indices for batch in ahead] + [torch.tensor([0])]).unique()
        loaded = ahead.records.take(rows).read()
        drop_cached(array)
        order = list(runs)
        for kind in order[round_ % len(order) :] + order[: round_ % len(order)]:
            sampler = runs[kind].sampler
            if isinstance(sampler, InMemory):
                sampler.rows, sampler.loaded = rows, loaded
            took, busy = seconds(runs[kind], given.warm_up)
            drop_cached(array)
            if round_:
                times[kind].append(took)
                processor[kind].append(busy)
    weights = [torch.cat([p.flatten() for p in run.model.parameters()]) for run in runs.values()]
    assert all(torch.equal(weights[0], other) for other in weights), "other weights"
    speeds = {
        kind: [m / t for m, t in zip(times["memory"], own, strict=True)]
        for kind, own in times.items()
        if kind != "memory"
    }
    return {
        "step_ms": {kind: spread([1e3 * t for t in own]) for kind, own in times.items()},
        "processor_ms": {kind: spread([1e3 * t for t in own]) for kind, own in processor.items()},
        "speed_over_memory": {kind: spread(ratios) for kind, ratios in speeds.items()},
        "same_weights": True,
    }


def drop_cached(array: np.memmap) -> None:
    """Have the next reads of the file begin with an empty page cache."""
    with open(str(array.filename), "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Memory(threading.Thread):
    """The most resident memory of this process while the thread runs, in MiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most: dict[str, float] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in ("VmRSS", "RssAnon", "RssFile"):
                    self.most[name] = max(self.most.get(name, 0.0), int(value.split()[0]) / 1024)


def measure_memory(path: str, rows: int, given: argparse.Namespace, answer: Any) -> None:
    array = np.memmap(path, np.float32, "r", shape=(rows, WIDTH))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for what in ("before", "training", "evaluation"):
            memory = Memory()
            memory.start()
            time.sleep(0.1)
            if what == "training":
                sampler = tacit.PoissonSampler(
                    records_of(array, 2),
                    expected_batch_size=given.batch_size,
                    steps=given.memory_steps,
                )
                training = Training(sampler, Path(folder) / "ledger.sqlite")
                found["training_rows_read"] = given.memory_steps * given.batch_size
                for _ in training.steps():
                    pass
            elif what == "evaluation":
                started = time.perf_counter()
                some = sampler.records.take(slice(given.evaluated))
                tacit.evaluate(training.model, some, training.loss)
                found["evaluated_rows"] = len(some)
                found["evaluation_seconds"] = time.perf_counter() - started
            memory.ended.set()
            memory.join()
            found[f"peak_mib_{what}"] = memory.most
    answer.put(found)


def values_arrive(array: np.memmap) -> int:
    rows = torch.arange(0, len(array), RATE_OF_VALUES)
    some = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:500]]
    read = records_of(array, 2).take(some).read().inputs
    wanted = np.stack([row_values(int(row)) for row in some])
    assert np.array_equal(read.numpy(), wanted)
    assert not records_of(array, 2).take(some[some < len(array) - 1] + 1).read().inputs.any()
    return len(some)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=20.0)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=120, help="steps of a round")
    parser.add_argument("--warm-up", type=int, default=10, help="steps of a round left out")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-steps", type=int, default=2000)
    parser.add_argument("--evaluated", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        array = make_file(folder / "rows.bin", given.gib)
        about = (folder / "rows.bin").stat()
        found: dict[str, Any] = {
            "file_gib": about.st_size / 2**30,
            "on_disk_mib": about.st_blocks * 512 / 2**20,
            "records": len(array),
            "rows_compared": values_arrive(array),
        }
        context = multiprocessing.get_context("spawn")
        answer = context.Queue()
        arguments = (str(array.filename), len(array), given, answer)
        process = context.Process(target=measure_memory, args=arguments)
        process.start()
        found["memory"] = answer.get()
        process.join()
        found |= compare(array, given, folder)
    most = max(p["VmRSS"] for k, p in found["memory"].items() if k.startswith("peak"))
    print(json.dumps(found, indent=2))
    print(f"speed over memory {found['speed_over_memory']['prefetch']}, most MiB {most:.0f}")
    report("training on 20 GiB that stay on disk", torch.device("cpu"), found, given.out)


if __name__ == "__main__":
    main()
