"""How much slower is per-sample clipping than plain training, and who does it fastest?

One process, one device, the same batch: plain training, Tacit's engines, Opacus flat and ghost, and
a twin in JAX (where these are installed). Blocks of steps of each kind alternate; times are medians
over blocks of the ratio to plain training in the same block, with quartiles. A step is gradient,
clipping, noise and optimizer (for Tacit its ledger too); sampling is left out for all.

Memory is what a step adds to the model and its inputs at its peak (not measured on the CPU): of
PyTorch's allocator while a step runs, or while it is recorded where a CUDA graph holds its memory
between steps; by the compiler's plan for JAX. What fails is reported in its own words.

    python benchmarks/clipping_speed.py --device cuda --models cifar_cnn wrn_16_4 gpt
"""

from __future__ import annotations

import argparse
import gc
import statistics
from importlib import metadata
from pathlib import Path

import torch
from clipping_steps import KINDS, MODELS, RECORDED, Job, Setting, tiny
from timing import Step, alternate, print_profile, ratios, report

LEAST_BLOCKS = 10
PROFILED = ("plain", "tacit")


def make(kind: str, setting: Setting, inputs, targets, physical) -> tuple[Step, int | None]:
    """A step that has run three times, and the bytes that it adds at its peak."""
    cuda = inputs.is_cuda
    torch.manual_seed(0)
    model = setting.model().to(inputs.device)
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = KINDS[kind](Job(setting, model, inputs, targets, physical))
    for _ in range(3):
        step.run()
    step.wait()
    if not cuda or step.bytes_used is not None:
        return step, step.bytes_used
    if kind not in RECORDED:
        torch.cuda.reset_peak_memory_stats()
        step.run()
        step.wait()
    return step, torch.cuda.max_memory_allocated() - before


def measure(
    setting: Setting,
    batch: int,
    kinds: list[str],
    device: torch.device,
    *,
    blocks: int,
    steps: int,
    physical: int | None,
    profiled: bool,
) -> dict:
    inputs, targets = (t.to(device) for t in setting.batch(batch))
    made: dict[str, Step] = {}
    memory: dict[str, int] = {}
    failed: dict[str, str] = {}
    for kind in kinds:
        try:
            made[kind], peak = make(kind, setting, inputs, targets, physical)
            if peak is not None:
                memory[kind] = peak
        except Exception as error:
            failed[kind] = f"{type(error).__name__}: {error}"[:400]
        gc.collect()  # what failed is out of the way of what comes next
    if profiled:
        for kind in PROFILED:
            if kind in made:
                print_profile(kind, made[kind], device)
    times = alternate(made, blocks, steps)
    return {
        "batch_size": batch,
        "physical": physical,
        "ms": {kind: 1e3 * statistics.median(found) for kind, found in times.items()},
        "time_over_plain": ratios(times, "plain"),
        "time_over_jax_plain": ratios(
            {kind: found for kind, found in times.items() if kind.startswith("jax")}, "jax plain"
        ),
        "peak_bytes": memory,
        "memory_over_plain": {
            kind: peak / memory["plain"] for kind, peak in memory.items() if "plain" in memory
        },
        "failed": failed,
        "blocks": blocks,
        "steps_per_block": steps,
    }


def show(found: dict) -> None:
    print(found["model"], found["batch_size"], "records:")
    for kind, milliseconds in found["ms"].items():
        line = f"  {kind:17s} {milliseconds:9.2f} ms"
        for base in ("time_over_plain", "time_over_jax_plain"):
            if kind in found[base]:
                low, high = found[base][kind]["quartiles"]
                ratio = found[base][kind]["median"]
                line += f"  {ratio:6.2f} [{low:.2f}, {high:.2f}] × {base[10:].replace('_', ' ')}"
        if kind in found["memory_over_plain"]:
            line += f"  memory {found['memory_over_plain'][kind]:.2f} ×"
        print(line)
    for kind, words in found["failed"].items():
        print(f"  {kind:17s} failed: {words}")


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def warm_libraries(device: torch.device) -> None:
    """Workspaces that stay for good belong to nobody's step."""
    square = torch.ones(64, 64, device=device, requires_grad=True)
    (square @ square).sum().backward()
    images = torch.ones(2, 3, 8, 8, device=device, requires_grad=True)
    torch.nn.Conv2d(3, 4, 3).to(device)(images).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["cifar_cnn"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="else the model's own")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--physical", type=int, help="Tacit takes larger batches in such pieces")
    parser.add_argument("--blocks", type=int, default=LEAST_BLOCKS)
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that all runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.blocks < LEAST_BLOCKS and not options.tiny:
        parser.error(f"--blocks {options.blocks}: a median needs at least {LEAST_BLOCKS}")
    kinds = ["plain", *(kind for kind in options.kinds if kind != "plain")]
    device = torch.device(options.device)
    warm_libraries(device)
    results = []
    for name in options.models:
        setting = tiny(name) if options.tiny else MODELS[name]
        for batch in options.batch_sizes or setting.batch_sizes:
            physical = options.physical
            found = measure(
                setting,
                batch,
                kinds,
                device,
                blocks=max(options.blocks, 2),
                steps=options.steps,
                physical=physical if physical and physical < batch else None,
                profiled=options.profile,
            )
            results.append({"model": name, **found})
            show(results[-1])
    report(
        "time and memory of per-sample clipping over plain training",
        device,
        results,
        options.out,
        versions={name: version(name) for name in ("torch", "opacus", "jax")},
        tiny=options.tiny,
    )


if __name__ == "__main__":
    main()
