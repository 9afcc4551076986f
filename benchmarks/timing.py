"""What the benchmarks share: whole private steps, blocks of steps that alternate, a report."""

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
from torch import nn
from torch.profiler import ProfilerActivity, profile

import tacit
from tacit.pytrees import Tree, num_rows
from tacit.queries import GradientQuery
from tacit.queries.bounded_gradient import Loss
from tacit.report.run_folder import source


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


def private_step(
    query: GradientQuery,
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    inputs: Tree,
    targets: Tree,
    max_physical: int | None = None,
) -> Callable[[], None]:
    """Gradient, noise of multiplier 1, a ledger in memory and the optimizer, on one batch."""
    count = num_rows(inputs)
    sampler = tacit.PoissonSampler(
        (inputs, targets), sampling_rate=1e-3, expected_batch_size=count, steps=100_000
    )
    mechanism = tacit.Mechanism(query, sampler, noise_multiplier=1.0)
    ledger = tacit.Ledger(None, tacit.Budget(epsilon=20.0, delta=1e-5))
    ledger.begin(mechanism.plan)
    batch = tacit.sampling.batch_of(
        inputs, targets, divisor=count, scheme=sampler.scheme, max_physical=max_physical
    )

    def step() -> None:
        ledger.release(mechanism.privatise(model, loss, batch), into=model)
        optimizer.step()

    return step


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


def print_profile(
    title: str, step: Step, device: torch.device, count: int = 10, steps: int = 1
) -> None:
    """The kernels (on a CPU, the operators) that take most of a step's time."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as found:
        time_block(step, steps)
    events = found.key_averages()
    if cuda:  # ranges that PyTorch names on the GPU's line hold kernels that are listed too
        kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        events = [e for e in kernels if not getattr(e, "is_user_annotation", False)]
    spent = {e: (e.self_device_time_total if cuda else e.self_cpu_time_total) for e in events}
    total = sum(spent.values())
    name = "GPU" if cuda else "CPU"
    print(f"{title}: {total / steps / 1e3:.2f} ms of the {name}'s time in a step", flush=True)
    for event in sorted(spent, key=lambda e: -spent[e])[:count]:
        share, times = spent[event] / max(total, 1e-9), event.count // steps
        print(
            f"  {spent[event] / steps / 1e3:9.3f} ms {share:6.1%} {times:5d} × {event.key[:100]}",
            flush=True,
        )


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
