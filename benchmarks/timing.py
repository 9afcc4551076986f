"""What the benchmarks share: blocks of steps that alternate, medians with quartiles, a report."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tacit.report import source


@dataclass(frozen=True)
class Step:
    """`wait` returns when the device is done; `bytes_used` is known where a compiler planned it."""

    run: Callable[[], object]
    wait: Callable[[], object]
    bytes_used: int | None = None


def step_on(device: torch.device, run: Callable[[], object]) -> Step:
    return Step(run, lambda: wait(device))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_block(step: Step, steps: int) -> float:
    """Seconds per step, over a block of steps that is waited for once at its end."""
    step.wait()
    started = time.perf_counter()
    for _ in range(steps):
        step.run()
    step.wait()
    return (time.perf_counter() - started) / steps


def alternate(
    steps: Mapping[str, Step], blocks: int, per_block: int | Mapping[str, int]
) -> dict[str, list[float]]:
    """Seconds per step of each block; blocks of each kind alternate in one process."""
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(blocks):
        for kind, step in steps.items():
            count = per_block if isinstance(per_block, int) else per_block[kind]
            times[kind].append(time_block(step, count))
    return times


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "quartiles": [low, high]}


def ratios(times: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, Any]]:
    """Of each kind's time over the base's in the same block."""
    if base not in times:
        return {}
    return {
        kind: spread([t / b for t, b in zip(blocks, times[base], strict=True)])
        for kind, blocks in times.items()
    }


def report(
    question: str, device: torch.device, results: object, path: Path | None, **more: object
) -> None:
    """Where the results come from, and the results, written to a file if one is given."""
    found = {
        "question": question,
        "source": source(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **more,
        "results": results,
    }
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")
