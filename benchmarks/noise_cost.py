"""What does the cryptographic stream cost?

On a CPU: Gaussians of the stream against `torch.randn` in float64, blocks alternating.
On a GPU: the whole private step of the CIFAR-10 CNN of Losing Less (0.55 M parameters, sampling,
clipping, noise, ledger on disk, optimizer) in four forms that alternate in one process:

    stream   as it is
    torch    noise by torch.randn, and PyTorch's generators not keyed for each step
    none     a stored vector of noise, generators not keyed: the least that drawing could cost
    again    the same as `none`, to show how far two equal forms differ

    python benchmarks/noise_cost.py --device cuda --out result.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from timing import alternate, ratios, report, spread, step_on

import tacit
import tacit.mechanism
from tacit.randomness import Randomness, Stream

CPU = torch.device("cpu")


def on_the_cpu(blocks: int, threads: int) -> dict:
    torch.set_num_threads(threads)
    stream, found = Randomness().stream("benchmark"), {}
    for size in (1_000, 100_000, 4_000_000):
        kinds = {
            "stream": step_on(CPU, lambda size=size: stream.normals([size], CPU)),
            "randn": step_on(CPU, lambda size=size: torch.randn(size, dtype=torch.float64)),
        }
        times = alternate(kinds, blocks + 1, max(1, 400_000 // size))
        times = {name: after_warm_up for name, (_, *after_warm_up) in times.items()}
        found[str(size)] = {
            "million_per_second": {
                name: size / statistics.median(t) / 1e6 for name, t in times.items()
            },
            "stream_over_randn": ratios(times, "randn")["stream"],
        }
    return found


class PrivateStep:
    def __init__(self, batch_size: int, file: Path, steps: int, device: torch.device) -> None:
        torch.manual_seed(0)
        inputs, targets = torch.randn(50_000, 3, 32, 32), torch.randint(10, (50_000,))
        records = tacit.Records(inputs, targets, num_classes=10, public_size=50_000).to(device)
        self.model = tacit.models.cifar_cnn().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.sampler = tacit.PoissonSampler(records, expected_batch_size=batch_size, steps=steps)
        self.mechanism = tacit.Mechanism(tacit.PerSampleClip(0.1), self.sampler, 1.0)
        self.ledger = tacit.Ledger(file, tacit.Budget(epsilon=50.0, delta=1e-5))
        self.ledger.begin(self.mechanism.plan)
        self.loss = tacit.losses.CrossEntropy()

    def __call__(self) -> None:
        private = self.mechanism.privatise(self.model, self.loss, self.sampler.next_batch())
        self.ledger.release(private, into=self.model)
        self.optimizer.step()


@contextlib.contextmanager
def drawing(kind: str):
    """Replace how noise is drawn, and whether generators are keyed."""
    normals, keyed = Stream.normals, tacit.mechanism.step_draws
    kept: dict[tuple[int, ...], torch.Tensor] = {}

    def by_torch(self, sizes, device, parameters=None):
        drawn = torch.randn(sum(sizes), device=device, dtype=torch.float64)
        return list(drawn.split(list(sizes)))

    def by_nothing(self, sizes, device, parameters=None):
        key = tuple(sizes)
        if key not in kept:
            kept[key] = torch.zeros(sum(sizes), device=device, dtype=torch.float64)
        return list(kept[key].split(list(sizes)))

    if kind != "stream":
        Stream.normals = by_torch if kind == "torch" else by_nothing  # type: ignore[assignment]
        tacit.mechanism.step_draws = lambda *args: contextlib.nullcontext()  # type: ignore
    try:
        yield
    finally:
        Stream.normals, tacit.mechanism.step_draws = normals, keyed  # type: ignore[assignment]


def on_the_gpu(blocks: int, per_block: int, batch_size: int) -> dict:
    device = torch.device("cuda")
    kinds = ["stream", "torch", "none", "again"]
    with tempfile.TemporaryDirectory() as folder:
        total = (blocks + 3) * per_block * len(kinds)
        step = PrivateStep(batch_size, Path(folder) / "ledger.sqlite", total, device)
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for block in range(blocks + 2):
            for kind in kinds:
                with drawing(kind):
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    for _ in range(per_block):
                        step()
                    torch.cuda.synchronize()
                    if block >= 2:
                        times[kind].append((time.perf_counter() - started) / per_block)
        step.ledger.close()
    sizes = [p.numel() for p in step.model.parameters()]
    draw = Randomness().stream("alone")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    alone = []
    for _ in range(50):
        start.record()
        for _ in range(20):
            draw.normals(sizes, device)
        end.record()
        end.synchronize()
        alone.append(start.elapsed_time(end) / 20)
    return {
        "batch_size": batch_size,
        "parameters": sum(sizes),
        "step_ms": {kind: spread([1e3 * t for t in times[kind]]) for kind in kinds},
        "over_none": ratios(times, "none"),
        "one_draw_ms": spread(alone),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: dict = {"python": platform.python_version()}
    found["cpu_one_thread"] = on_the_cpu(given.blocks, 1)
    found["cpu_all_threads"] = on_the_cpu(given.blocks, torch.get_num_interop_threads())
    if given.device == "cuda":
        found["steps"] = [
            on_the_gpu(given.blocks, given.steps, size) for size in (64, 256, 1024, 4096)
        ]
    print(json.dumps(found, indent=2))
    report("what the cryptographic stream costs", torch.device(given.device), found, given.out)


if __name__ == "__main__":
    main()
