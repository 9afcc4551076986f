"""Does a run that is killed at random moments end within its budget, and as good as others?

Small runs of all routes and samplers are killed with SIGKILL after random times and resumed from
their checkpoints, until they end; as many are left alone. Checked of each run:

    budget      the events charged on the ledger are at most those of the plan, and so is epsilon
    draws       no key of the random stream is used twice for noise or for batches, by any process
    charged     no noise was drawn that had not been charged
    lost        charged steps that are not part of the weights: at most one lease for each kill

The accuracies of both groups are compared, and the cost of a checkpoint is measured.

    python benchmarks/kill_and_resume.py --kills 200 --out result.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import tacit
from tacit.ledger.store import LedgerLog
from tacit.randomness import Randomness
from tacit.sampling import FixedSizeSampler, MiniSetSampler, PoissonSampler, ShuffleSampler
from tacit.training import Checkpoint, LedgerRun, MovingAverage
from tacit.training.checkpoint import FILE

COUNT, FEATURES, STEPS, DELTA = 600, 8, 200, 1e-4
REPLACE = tacit.Relation.REPLACE_ONE
ADD = tacit.Relation.ADD_OR_REMOVE_ONE


def records(seed: int, count: int = COUNT) -> tacit.Records:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator)
    noisy = inputs[:, 0] - inputs[:, 1] + 0.5 * torch.randn(count, generator=generator)
    return tacit.Records(inputs, (noisy > 0).long(), 2, public_size=count)


@dataclass(frozen=True)
class Case:
    """One way to train. `noise` is fixed, so that no process has to calibrate it."""

    name: str
    relation: tacit.Relation
    sampler: Callable[[tacit.Records, int], tacit.sampling.Sampler]
    query: Callable[[], object]
    optimizer: Callable[..., torch.optim.Optimizer]
    model: Callable[[], nn.Module] = lambda: nn.Linear(FEATURES, 2)
    noise: float = 1.5
    seed: int | None = None

    def trainer(self, folder: Path, steps: int = STEPS) -> tacit.Trainer:
        torch.manual_seed(1)
        model = self.model()
        optimizer = self.optimizer(model.parameters())
        return tacit.Trainer(
            model,
            tacit.losses.CrossEntropy(),
            self.query(),
            self.sampler(records(0), steps),
            optimizer,
            tacit.Budget(1000.0, DELTA, self.relation),
            noise=tacit.Noise(self.noise),
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
            moving_average=MovingAverage(0.9),
            callbacks=[],
            ledger=LedgerRun(folder / "ledger.sqlite", "run"),
            checkpoint=Checkpoint(folder),
            seed=self.seed,
        )


def _adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


CASES = [
    Case(
        "clip, Poisson, Adam",
        ADD,
        lambda data, steps: PoissonSampler(data, 0.2, steps=steps),
        lambda: tacit.PerSampleClip(1.0),
        _adam,
    ),
    Case(
        "clip, Poisson, Adam, seeded, adaptive norm",
        ADD,
        lambda data, steps: PoissonSampler(data, 0.2, steps=steps),
        lambda: tacit.PerSampleClip(tacit.AdaptiveNorm(1.0, count_noise=20.0)),
        _adam,
        seed=5,
    ),
    Case(
        "clipless, fixed size, SGD",
        REPLACE,
        lambda data, steps: FixedSizeSampler(data, 120, steps=steps),
        lambda: tacit.Clipless(gradient_clip=1.0),
        _sgd,
        model=lambda: nn.Sequential(
            tacit.lipschitz.BoundedInput(6.0), tacit.lipschitz.SpectralLinear(FEATURES, 2)
        ),
    ),
    Case(
        "batch clip, mini-sets, SGD",
        ADD,
        lambda data, steps: MiniSetSampler(data, 4, steps=STEPS, chosen=40),
        lambda: tacit.BatchClip(0.5, 4),
        _sgd,
    ),
    Case(
        "clip, shuffled epochs, SGD, seeded",
        REPLACE,
        lambda data, steps: ShuffleSampler(data, 60, steps=steps),
        lambda: tacit.PerSampleClip(1.0),
        _sgd,
        noise=8.0,
        seed=6,
    ),
]


# ---- the process that is killed ------------------------------------------------------------------


def log_draws(file: Path) -> None:
    """From now on each stream for noise or for a batch first leaves its key's digest on disk."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stream = Randomness.stream

    def logged(self: Randomness, purpose: str, *step: object):
        made = stream(self, purpose, *step)
        if purpose in ("noise", "sampling"):
            digest = hashlib.sha256(made.key).hexdigest()[:32]
            os.write(log, f"{purpose} {digest}\n".encode())
        return made

    Randomness.stream = logged


def child(case: Case, folder: Path) -> None:
    """Train, or go on from the checkpoint that is there; write the result at the end."""
    log_draws(folder / "draws.txt")
    trainer = case.trainer(folder)
    has_checkpoint = (folder / FILE).exists()
    run = trainer.fit(resume=folder if has_checkpoint else None)
    found = {
        "steps": run.steps,
        "epsilon": run.epsilon,
        "accuracy": run.evaluate(records(1, 4000)).accuracy,
        "notes": run.notes,
    }
    (folder / "result.new").write_text(json.dumps(found))
    os.replace(folder / "result.new", folder / "result.json")


def started(case: Case, folder: Path) -> int:
    """A forked process that trains: torch and Tacit are imported, and accounting is cached."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child(case, folder)
            code = 0
        except BaseException as error:
            print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return pid


def killed(pid: int, after: float) -> bool:
    """Kill the process after so many seconds; False if it ended by itself before."""
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if status:
                raise RuntimeError(f"a process ended with status {status}")
            return False
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


# ---- one run, and what must hold of it -----------------------------------------------------------


def one_run(case: Case, folder: Path, delay: Callable[[], float], kills: int) -> dict:
    """Run to the end, killed up to `kills` times; returns what happened, and what was wrong."""
    folder.mkdir(parents=True)
    happened = 0
    while happened < kills and killed(started(case, folder), delay()):
        happened += 1
    if not (folder / "result.json").exists():
        assert not killed(started(case, folder), 120.0), "the run did not end"
    result = json.loads((folder / "result.json").read_text())
    return result | {"case": case.name, "kills": happened} | checked(case, folder, happened, result)


def checked(case: Case, folder: Path, kills: int, result: dict) -> dict:
    trainer = case.trainer(folder)
    scheme, limit = trainer.plan.scheme, trainer.plan.scheme.num_events(STEPS)
    with LedgerLog(folder / "ledger.sqlite").transaction() as state:
        (run,) = state.live()
    lines = (folder / "draws.txt").read_text().split("\n")
    drawn = Counter(line for line in lines if line)
    noise = sum(line.startswith("noise") for line in drawn)
    planned = trainer.plan.epsilon_of_count(limit, DELTA)
    lease = max(1, limit // 100)
    lost = run.charged - scheme.num_events(result["steps"])
    wrong = []
    if run.charged > limit or result["epsilon"] > planned * (1 + 1e-9):
        wrong.append(f"over budget: {run.charged} of {limit}, epsilon {result['epsilon']}")
    if drawn and max(drawn.values()) > 1:
        wrong.append(f"{sum(c > 1 for c in drawn.values())} draws were made twice")
    if noise > scheme.steps_within(run.charged):
        wrong.append(f"{noise} steps drew noise, and {run.charged} events are charged")
    if not 0 <= lost <= kills * lease:
        wrong.append(f"{lost} events lost in {kills} kills with leases of {lease}")
    return {
        "charged": run.charged,
        "limit": limit,
        "lease": lease,
        "attempts": len(run.attempts),
        "lost": lost,
        "steps_drawn": noise,
        "planned_epsilon": planned,
        "wrong": wrong,
    }


def seeded_anew(case: Case, number: int) -> Case:
    """Runs of one seed on ledgers of their own would all be the same, and show no spread."""
    return case if case.seed is None else replace(case, seed=case.seed + 100 * number)


def campaign(kills: int, folder: Path, seed: int = 0, cases: list[Case] = CASES) -> dict:
    """So many kills, over runs of all cases in turn, and as many runs that are left alone."""
    chance = random.Random(seed)
    killed_runs: list[dict] = []
    alone: list[dict] = []
    seconds: dict[str, float] = {}
    for case in cases:  # fills the caches of accounting, which forked processes inherit
        with_caches = folder / "warm" / case.name
        with_caches.mkdir(parents=True)
        case.trainer(with_caches).fit()
        begun = time.monotonic()
        alone.append(one_run(case, folder / f"alone {len(alone)}", lambda: 0.0, 0))
        seconds[case.name] = time.monotonic() - begun
    while (left := kills - sum(run["kills"] for run in killed_runs)) > 0:
        case = cases[len(killed_runs) % len(cases)]
        typical = seconds[case.name]
        name = f"killed {len(killed_runs)}"
        # Half of the kills come early, so that beginnings and resumptions are hit as well.
        killed_runs.append(
            one_run(
                seeded_anew(case, len(killed_runs)),
                folder / name,
                lambda typical=typical: (
                    chance.uniform(0, typical) * (0.5 if chance.random() < 0.5 else 0.15)
                ),
                min(left, 8),
            )
        )
        if len(alone) < len(killed_runs) + len(cases):
            number = len(alone)
            spared = seeded_anew(case, number)
            alone.append(one_run(spared, folder / f"alone {number}", lambda: 0.0, 0))
    return {"killed": killed_runs, "alone": alone, "seconds_of_a_run": seconds}


def _difference(killed: list[dict], alone: list[dict]) -> float | None:
    """Of the mean accuracies, in standard errors of the difference (Welch)."""
    groups = [[run["accuracy"] for run in runs] for runs in (killed, alone)]
    if min(map(len, groups)) < 2:
        return None
    error = sum(statistics.variance(group) / len(group) for group in groups) ** 0.5
    return (statistics.mean(groups[0]) - statistics.mean(groups[1])) / error if error else None


def summary(result: dict, cases: list[Case] = CASES) -> dict:
    def figures(runs: list[dict]) -> dict:
        accuracies = [run["accuracy"] for run in runs]
        spread = statistics.stdev(accuracies) if len(runs) > 1 else 0.0
        return {
            "runs": len(runs),
            "accuracy_mean": statistics.mean(accuracies),
            "accuracy_spread": spread,
            "accuracy_least": min(accuracies),
            "accuracy_most": max(accuracies),
        }

    by_case = {}
    for case in cases:
        groups = {
            which: [run for run in result[which] if run["case"] == case.name]
            for which in ("killed", "alone")
        }
        by_case[case.name] = {which: figures(runs) for which, runs in groups.items() if runs} | {
            "difference_in_standard_errors": _difference(*groups.values()),
            "kills": sum(run["kills"] for run in groups["killed"]),
            "lost_events": sum(run["lost"] for run in groups["killed"]),
            "lease": groups["alone"][0]["lease"],
            "limit": groups["alone"][0]["limit"],
        }
    everything = [*result["killed"], *result["alone"]]
    return {
        "kills": sum(run["kills"] for run in result["killed"]),
        "attempts": sum(run["attempts"] for run in result["killed"]),
        "wrong": [f"{run['case']}: {what}" for run in everything for what in run["wrong"]],
        "by_case": by_case,
    }


# ---- what a checkpoint costs ---------------------------------------------------------------------


def cost(folder: Path, repeats: int) -> dict:
    """Milliseconds of one checkpoint, and of a step, for models of several sizes."""
    from tacit.training.checkpoint import Progress, save_state

    found = {}
    models = {
        "linear, 18 weights": lambda: nn.Linear(FEATURES, 2),
        "2 x 512, 271 thousand": lambda: nn.Sequential(
            *(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()),
            nn.Linear(512, 2),
        ),
        "2 x 2048, 4.2 million": lambda: nn.Sequential(
            *(nn.Linear(FEATURES, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()),
            nn.Linear(2048, 2),
        ),
    }
    for name, make in models.items():
        case = Case(name, ADD, CASES[0].sampler, CASES[0].query, _adam, model=make)
        place = folder / name
        place.mkdir(parents=True)
        trainer = case.trainer(place, steps=20)
        checkpoint, trainer.checkpoint = trainer.checkpoint, None
        begun = time.perf_counter()
        run = trainer.fit()
        step = (time.perf_counter() - begun) / run.steps
        with tacit.Ledger(place / "other.sqlite", trainer.budget) as ledger:
            ledger.begin(trainer.plan)
            times = []
            for _ in range(repeats):
                begun = time.perf_counter()
                save_state(checkpoint, trainer, ledger.position(), Progress(step=1))
                times.append(1e3 * (time.perf_counter() - begun))
            lease = []
            for _ in range(repeats):  # what charging a lease costs by itself: one row, synced
                begun = time.perf_counter()
                with ledger._log.transaction():
                    ledger._log.append("charge", run=1, attempt=1, events=1)
                lease.append(1e3 * (time.perf_counter() - begun))
        q = statistics.quantiles(times, n=4)
        found[name] = {
            "bytes": checkpoint.file.stat().st_size,
            "checkpoint_ms": q[1],
            "checkpoint_ms_quartiles": [q[0], q[2]],
            "step_ms": 1e3 * step,
            "charge_of_a_lease_ms": statistics.median(lease),
        }
    return found


def short_run(folder: Path, pairs: int) -> dict:
    """Seconds of `tacit train` on the digits, 60 steps, with checkpoints and without, in turn."""
    from typer.testing import CliRunner

    from tacit.cli import app

    told = ["train", "--dataset", "digits", "--noise-multiplier", "5.5", "--delta", "1e-4"]
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for pair in range(pairs + 1):
        for kind, more in (("without", ["--checkpoint-every", "0"]), ("with", [])):
            out = ["--quiet", "--json", "--out", str(folder / f"{kind} {pair}")]
            result = CliRunner().invoke(app, [*told, *out, *more], catch_exceptions=False)
            seconds[kind].append(json.loads(result.stdout)["seconds"])
    measured = {kind: times[1:] for kind, times in seconds.items()}  # the first pair warms up
    pairs_of = zip(measured["with"], measured["without"], strict=True)
    return {**measured, "difference": [a - b for a, b in pairs_of]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--short-run", type=int, help="measure this alone, so many times")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.short_run:
        with tempfile.TemporaryDirectory() as name:
            found = short_run(Path(name), arguments.short_run)
        print(json.dumps(found, indent=1))
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        return
    with tempfile.TemporaryDirectory() as name:
        begun = time.monotonic()
        result = campaign(arguments.kills, Path(name), arguments.seed)
        whole = {
            "torch": torch.__version__,
            "platform": platform.platform(),
            "arguments": {"kills": arguments.kills, "seed": arguments.seed},
            "summary": summary(result),
            "seconds": time.monotonic() - begun,
            "cost": cost(Path(name) / "cost", arguments.repeats),
            **result,
        }
    print(json.dumps({k: whole[k] for k in ("summary", "seconds", "cost")}, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(whole, indent=1) + "\n")
    if whole["summary"]["wrong"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
