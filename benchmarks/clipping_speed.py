"""How much slower is per-sample clipping than plain training, and who does it fastest?

One process, one device, the same batch: plain training, Tacit's engines, Opacus flat and ghost
(where it is installed). Blocks of steps of each kind alternate; times are medians over blocks, and
memory is the peak of the GPU's allocator during a step (not measured on the CPU). A step is
gradient, clipping, noise and optimizer (for Tacit its ledger too); sampling is left out for all.

    python benchmarks/clipping_speed.py --device cuda --batch-sizes 64 256 1024 4096
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tacit
from tacit.queries import BookKeeping, PerRecord, Replay
from tacit.queries.engines import Engine

MAX_NORM, NOISE = 0.1, 1.0


def plain(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def with_engine(engine: Engine) -> Callable[[nn.Module, Tensor, Tensor], Callable[[], None]]:
    """The real thing: query, mechanism and a ledger in memory, always on the same batch."""

    def make(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        query = tacit.PerSampleClip(MAX_NORM, engine=engine)
        sampler = tacit.PoissonSampler(
            (inputs, targets), sampling_rate=1e-3, expected_batch_size=len(inputs), steps=100_000
        )
        mechanism = tacit.Mechanism(query, sampler, NOISE)
        ledger = tacit.Ledger(None, tacit.Budget(epsilon=20.0, delta=1e-5))
        ledger.begin(mechanism.plan)
        batch = tacit.batch_of(inputs, targets, divisor=len(inputs), scheme=sampler.scheme)

        def step() -> None:
            private = mechanism.privatise(model, F.cross_entropy, batch)
            ledger.release(private, into=model)
            optimizer.step()

        return step

    return make


def opacus(mode: str) -> Callable[[nn.Module, Tensor, Tensor], Callable[[], None]]:
    def make(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
        from opacus import PrivacyEngine

        data = torch.utils.data.TensorDataset(inputs.cpu(), targets.cpu())
        loader = torch.utils.data.DataLoader(data, batch_size=len(inputs))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        criterion = nn.CrossEntropyLoss()
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=NOISE,
            max_grad_norm=MAX_NORM,
            poisson_sampling=False,
            grad_sample_mode=mode,
            criterion=criterion,
        )
        wrapped, private = made[0], made[1]
        if mode == "ghost":
            criterion = made[2]

        def step() -> None:
            private.zero_grad(set_to_none=True)
            criterion(wrapped(inputs), targets).backward()
            private.step()

        return step

    return make


KINDS: dict[str, Callable[[nn.Module, Tensor, Tensor], Callable[[], None]]] = {
    "plain": plain,
    "tacit": with_engine(BookKeeping()),
    "tacit replay": with_engine(Replay()),
    "tacit per record": with_engine(PerRecord()),
    "opacus flat": opacus("hooks"),
    "opacus ghost": opacus("ghost"),
}
MODELS = {
    "cifar_cnn": lambda: tacit.models.cifar_cnn(),
    "cifar_cnn_wide": lambda: tacit.models.cifar_cnn(width=64),
}


def time_step(step: Callable[[], None], steps: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / steps


def measure(
    name: str, batch: int, kinds: list[str], device: torch.device, blocks: int, steps: int
) -> dict:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch, 3, 32, 32, generator=generator).to(device)
    targets = torch.randint(10, (batch,), generator=generator).to(device)
    made, memory, failed = {}, {}, {}
    for kind in kinds:
        torch.manual_seed(0)
        try:
            step = KINDS[kind](MODELS[name]().to(device), inputs, targets)
            for _ in range(3):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step()
                torch.cuda.synchronize()
                memory[kind] = torch.cuda.max_memory_allocated() - before
            made[kind] = step
        except (ImportError, torch.cuda.OutOfMemoryError) as error:
            failed[kind] = f"{type(error).__name__}: {error}"[:200]
    times: dict[str, list[float]] = {kind: [] for kind in made}
    for _ in range(blocks):
        for kind, step in made.items():
            times[kind].append(time_step(step, steps, device))
    return {
        "model": name,
        "batch_size": batch,
        "plain_ms": 1e3 * statistics.median(times["plain"]),
        "time_over_plain": {
            kind: statistics.median(t / p for t, p in zip(found, times["plain"], strict=True))
            for kind, found in times.items()
        },
        "quartiles": {
            kind: [
                statistics.quantiles(
                    [t / p for t, p in zip(found, times["plain"], strict=True)], n=4
                )[i]
                for i in (0, 2)
            ]
            for kind, found in times.items()
        },
        "memory_over_plain": {kind: m / memory["plain"] for kind, m in memory.items()},
        "failed": failed,
        "blocks": blocks,
        "steps_per_block": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    results = []
    for name in options.models:
        for batch in options.batch_sizes:
            found = measure(name, batch, options.kinds, device, options.blocks, options.steps)
            results.append(found)
            ratios = {k: round(v, 2) for k, v in found["time_over_plain"].items()}
            sizes = {k: round(v, 2) for k, v in found["memory_over_plain"].items()}
            print(name, batch, f"plain {found['plain_ms']:.2f} ms", ratios, sizes, found["failed"])
    report = {
        "question": "time and memory of per-sample clipping over plain training",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "results": results,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
