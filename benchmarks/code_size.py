"""How large is the code, and how many files does one clipping step enter?

Prints, for the package below a source folder: files, lines, the median length, files under 40
lines, public names, and the files that a step `ledger.release(mechanism.privatise(...))` of a
small network enters, with the number of calls from one file into another, once eager and once with
steps that compile. Steps 13 to 48 of 100,000 are traced. Some of them meet a batch size for the
first time, plan it, and enter more files. The figures are medians, and the most that any step
entered. The steps run in a process of their own, on the package in that folder, so an older
checkout can be measured too.

    python benchmarks/code_size.py
    python benchmarks/code_size.py --source ../older/src --files
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

WARM_UP, STEPS = 12, 100_000


def sizes(package: Path) -> dict[str, float]:
    lengths = [len(p.read_text(encoding="utf-8").splitlines()) for p in package.rglob("*.py")]
    return {
        "files": len(lengths),
        "lines": sum(lengths),
        "median length": statistics.median(lengths),
        "files under 40 lines": sum(length < 40 for length in lengths),
    }


def trace_steps(*, compiled: bool) -> dict[str, Any]:
    """The public names, and the package's files in the order in which a step enters them."""
    import torch

    import tacit
    from tacit import engines

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    inputs, targets = torch.randn(64, 8), torch.randint(3, (64,))
    records = tacit.Records(inputs, targets, num_classes=3, public_size=64)
    sampler = tacit.PoissonSampler(records, expected_batch_size=16, steps=STEPS, seed=0)
    engine = engines.Automatic(engines.Recorder(compile=compiled))
    query = tacit.PerSampleClip(1.0, engine=engine)
    mechanism = tacit.Mechanism(query, sampler, noise_multiplier=50.0)
    package = str(Path(tacit.__file__).parent)
    entered: list[str] = []
    crossings = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal crossings
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(package):
            return
        entered.append(os.path.relpath(file, package))
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(package):
            caller = caller.f_back
        crossings += caller is not None and caller.f_code.co_filename != file

    traced: list[tuple[list[str], int]] = []
    with tempfile.TemporaryDirectory() as folder:
        budget = tacit.Budget(epsilon=50.0, delta=1e-5)
        ledger = tacit.Ledger(Path(folder) / "ledger.sqlite", budget)
        ledger.begin(mechanism.plan)
        loss = tacit.losses.CrossEntropy()
        for step, batch in enumerate(itertools.islice(sampler, 48)):
            entered, crossings = [], 0
            sys.setprofile(profile if step >= WARM_UP else None)
            ledger.release(mechanism.privatise(model, loss, batch), into=model)
            sys.setprofile(None)
            if step >= WARM_UP:
                traced.append((list(dict.fromkeys(entered)), crossings))
        ledger.close()
    traced.sort(key=lambda step: len(step[0]))
    middle, most = traced[len(traced) // 2], traced[-1]
    kind = "a compiled" if compiled else "an eager"
    return {
        "public names": len(tacit.__all__),
        f"files of {kind} step": len(middle[0]),
        f"files of the longest, {kind.split()[1]}": len(most[0]),
        f"calls from file to file, {kind.split()[1]}": statistics.median(c for _, c in traced),
        f"{kind} step": middle[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--files", action="store_true", help="name the files that a step enters")
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trace:
        print(json.dumps(trace_steps(compiled=False) | trace_steps(compiled=True)))
        return
    source = given.source.resolve()
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, __file__, "--trace"]
    traced = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = {**sizes(source / "tacit"), **json.loads(traced.stdout.splitlines()[-1])}
    for name, value in found.items():
        if not isinstance(value, list):
            print(f"{name:36} {value:>8g}")
        elif given.files:
            print(f"files of {name}, in its order:", *value, sep="\n  ")


if __name__ == "__main__":
    main()
