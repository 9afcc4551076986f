"""Is one version of the sources as fast and as accurate as another, and does it state the same ε?

Workers alternate between the two versions, each in a process of its own with one source folder
first on the path. Asked of both: ε of golden plans, imports, the digits run of `make train` over
seeds, and milliseconds of a clipping and a clipless step, ledger on disk, sampling and noise
included, before and after the step has compiled. Ratios are of medians within a round.

    python benchmarks/two_versions.py --before ../before/src --rounds 7 --seeds 5 --out result.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1] / "src"
QUESTIONS = ("golden", "digits", "steps")
IMPORTS = {"import torch": "import torch", "import tacit": "import tacit, tacit.training"}


def golden() -> dict[str, float]:
    """ε of Poisson plans that a user would run, at δ = 1e-5."""
    import tacit
    from tacit.sampling import Poisson

    plans = [(0.8, 0.01, 1000), (1.0, 0.01, 1000), (1.54, 0.02048, 1465), (4.0, 0.2, 300)]
    return {
        f"z={z} q={q} steps={steps}": tacit.epsilon(z, Poisson(q), steps=steps, delta=1e-5)
        for z, q, steps in plans
    }


def digits(seed: int) -> dict[str, float]:
    """Accuracy of the run of `make train`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tacit", "train", "--dataset", "digits"]
        command += ["--query", "clipless", "--epsilon", "3", "--delta", "1e-4"]
        command += ["--seed", str(seed), "--out", f"{folder}/run", "--json"]
        began = time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - began
    run = json.loads(done.stdout)
    return {"accuracy": run["accuracy"], "ε": run["epsilon"], "seconds": seconds}


def steps() -> dict[str, float]:
    """Milliseconds per released step of an MLP, a CNN and a Lipschitz MLP: medians of blocks."""
    import torch

    import tacit

    torch.set_num_threads(2)
    flat = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )  # fmt: skip
    image = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 5, 2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3),
        torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32 * 10 * 10, 10),
    )  # fmt: skip
    light = tacit.models.lipschitz_mlp((1, 8, 8), 10)
    cases = {
        "MLP, clipping": (flat, (64,), tacit.PerSampleClip(1.0)),
        "CNN, clipping": (image, (1, 28, 28), tacit.PerSampleClip(1.0)),
        "Lipschitz MLP, clipless": (light, (1, 8, 8), tacit.Clipless()),
    }
    found = {}
    for name, (model, shape, query) in cases.items():
        found.update({f"{name}, {when}": ms for when, ms in time_steps(model, shape, query)})
    return found


def time_steps(model: Any, shape: tuple[int, ...], query: Any) -> list[tuple[str, float]]:
    import torch

    import tacit

    torch.manual_seed(0)
    inputs, targets = torch.randn(1024, *shape), torch.randint(10, (1024,))
    records = tacit.Records(inputs, targets, num_classes=10, public_size=1024)
    total = 900
    sampler = tacit.PoissonSampler(records, expected_batch_size=128, steps=total, seed=1)
    mechanism = tacit.Mechanism(query, sampler, noise_multiplier=1.0, seed=1)
    loss = tacit.losses.CrossEntropy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times = []
    with tempfile.TemporaryDirectory() as folder:
        budget = tacit.Budget(epsilon=500.0, delta=1e-5)
        ledger = tacit.Ledger(Path(folder) / "ledger.sqlite", budget)
        ledger.begin(mechanism.plan)
        for batch in sampler:
            began = time.perf_counter()
            ledger.release(mechanism.privatise(model, loss, batch), into=model)
            optimizer.step()
            tacit.project(model)
            times.append(1000 * (time.perf_counter() - began))
        ledger.close()
    return [
        ("first", times[0]),
        ("steps 10 to 60", statistics.median(times[10:60])),
        ("last 300 steps", statistics.median(times[-300:])),
    ]


def ask(source: Path, question: str, *arguments: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, __file__, "--answer", question, *arguments]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds(source: Path, code: str) -> float:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return time.perf_counter() - began


def compare(before: Path, after: Path, rounds: int, seeds: int) -> dict[str, Any]:
    versions = {"before": before, "after": after}
    found: dict[str, Any] = {
        "golden ε": {name: ask(source, "golden") for name, source in versions.items()},
        "digits": {name: [] for name in versions},
        "seconds of imports": {name: [] for name in versions},
        "milliseconds of steps": {name: [] for name in versions},
    }
    for seed in range(seeds):
        for name, source in versions.items():
            found["digits"][name].append(ask(source, "digits", str(seed)))
    for turn in range(rounds):
        order = list(versions.items()) if turn % 2 == 0 else list(versions.items())[::-1]
        for name, source in order:
            spent = {what: seconds(source, code) for what, code in IMPORTS.items()}
            found["seconds of imports"][name].append(spent)
            found["milliseconds of steps"][name].append(ask(source, "steps"))
    return found


def summary(found: dict[str, Any]) -> str:
    lines = [f"{'':44}{'before':>12}{'after':>12}{'after/before (quartiles)':>32}"]

    def row(name: str, before: list[float], after: list[float]) -> None:
        each = [a / b for a, b in zip(after, before, strict=True)]
        ratio = f"{statistics.median(each):.3f}"
        if len(each) > 2:
            low, _, high = statistics.quantiles(each, n=4, method="inclusive")
            ratio += f" ({low:.3f} to {high:.3f})"
        middle = [statistics.median(v) for v in (before, after)]
        lines.append(f"{name:44}{middle[0]:12.5g}{middle[1]:12.5g}{ratio:>32}")

    for plan, epsilon in found["golden ε"]["before"].items():
        row(f"ε, {plan}", [epsilon], [found["golden ε"]["after"][plan]])
    for part in ("digits", "seconds of imports", "milliseconds of steps"):
        before, after = found[part]["before"], found[part]["after"]
        for name in before[0] if before else ():
            row(f"{part}: {name}"[:43], [b[name] for b in before], [a[name] for a in after])
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the source folder of the older version")
    parser.add_argument("--after", type=Path, default=HERE)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--answer", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        question, *arguments = given.answer
        print(json.dumps(globals()[question](*map(int, arguments))))
        return
    if given.before is None:
        parser.error("name the older version's source folder with --before")
    found = compare(given.before.resolve(), given.after.resolve(), given.rounds, given.seeds)
    found["machine"] = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(summary(found))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
