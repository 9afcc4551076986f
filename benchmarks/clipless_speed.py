"""How much slower is clipless training than plain training of the ordinary network?

One process, one device, the same batch: plain training of the CIFAR-10 CNN and of its Lipschitz
twin, clipless training of the twin (as it is, and replayed as CUDA graphs), and Opacus, flat and
ghost, on the ordinary CNN. A private step is gradient, noise, ledger, optimizer and projection.

    python benchmarks/clipless_speed.py --device cuda --batch-sizes 256 1024 4096
    python benchmarks/clipless_speed.py --kinds "plain cnn" "projection alone, light twin" --profile
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from clipping_steps import Job, cifar_cnn, opacus, plain
from timing import Step, alternate, print_profile, private_step, ratios, report, step_on
from torch import nn

import tacit
from tacit.lipschitz import Absolute


def ordinary(width: int) -> nn.Module:
    return tacit.models.cifar_cnn(width=width)


def twin(width: int) -> nn.Module:
    return tacit.lipschitz_twin(ordinary(width)).model


def light_twin(width: int) -> nn.Module:
    """Absolute values for MaxMin, and kernels bounded by their flattened matrices."""
    made = tacit.lipschitz_twin(
        ordinary(width), activation=lambda channels, axis: Absolute(), reshaped=True
    )
    return made.model


def clipless(recorded: bool) -> Callable[[Job], Step]:
    def make(job: Job) -> Step:
        model, inputs, targets = job.model, job.inputs, job.targets
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = tacit.losses.CrossEntropy(0.1)
        query = tacit.Clipless(
            gradient_clip=1.0, recorder=tacit.engines.Recorder(capture=recorded, compile=recorded)
        )
        private = private_step(query, model, loss, optimizer, inputs, targets)

        def step() -> None:
            private()
            tacit.project(model)

        return step_on(job.inputs.device, step)

    return make


def projection_alone(job: Job) -> Step:
    return step_on(job.inputs.device, lambda: tacit.project(job.model))


KINDS: dict[str, tuple[Callable[[int], nn.Module], Callable[[Job], Step]]] = {
    "plain cnn": (ordinary, plain),
    "plain twin": (twin, plain),
    "clipless": (twin, clipless(False)),
    "clipless recorded": (twin, clipless(True)),
    "clipless, light twin": (light_twin, clipless(False)),
    "clipless recorded, light twin": (light_twin, clipless(True)),
    "projection alone": (twin, projection_alone),
    "projection alone, light twin": (light_twin, projection_alone),
    "opacus flat": (ordinary, opacus("hooks")),
    "opacus ghost": (ordinary, opacus("ghost")),
}


def measure(
    width: int,
    batch: int,
    kinds: list[str],
    device: torch.device,
    blocks: int,
    steps: int,
    *,
    profiled: bool = False,
) -> dict:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch, 3, 32, 32, generator=generator).to(device)
    targets = torch.randint(10, (batch,), generator=generator).to(device)
    made, memory, failed = {}, {}, {}
    for kind in kinds:
        torch.manual_seed(0)
        network, make = KINDS[kind]
        try:
            job = Job(cifar_cnn(width), network(width).to(device), inputs, targets, None)
            step = make(job)
            memory[kind] = peak_memory(step, device)
            made[kind] = step
        except (ImportError, torch.cuda.OutOfMemoryError) as error:
            failed[kind] = f"{type(error).__name__}: {error}"[:200]
    if profiled:
        for kind, step in made.items():
            print_profile(kind, step, device)
    times = alternate(made, blocks, steps)
    over = ratios(times, "plain cnn")
    return {
        "width": width,
        "batch_size": batch,
        "plain_ms": 1e3 * statistics.median(times["plain cnn"]),
        "time_over_plain": {kind: r["median"] for kind, r in over.items()},
        "quartiles": {kind: r["quartiles"] for kind, r in over.items()},
        "peak_bytes": memory,
        "memory_over_plain": {kind: m / memory["plain cnn"] for kind, m in memory.items() if m},
        "failed": failed,
        "blocks": blocks,
        "steps_per_block": steps,
    }


def peak_memory(step: Step, device: torch.device) -> int:
    """The peak of the GPU's allocator over the first steps, recording of graphs included."""
    if device.type != "cuda":
        for _ in range(3):
            step.run()
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        step.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--profile", action="store_true", help="print each kind's operations")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    results = []
    for width in options.widths:
        for batch in options.batch_sizes:
            found = measure(
                width,
                batch,
                options.kinds,
                device,
                options.blocks,
                options.steps,
                profiled=options.profile,
            )
            results.append(found)
            ratios = {k: round(v, 2) for k, v in found["time_over_plain"].items()}
            sizes = {k: round(v, 2) for k, v in found["memory_over_plain"].items()}
            print(width, batch, f"plain {found['plain_ms']:.2f} ms", ratios, sizes, found["failed"])
    report("time and memory of clipless training over plain training", device, results, options.out)


if __name__ == "__main__":
    main()
