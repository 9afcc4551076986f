"""What every figure's file shares: its runs side by side, a table, JSON and a plot."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from runs import DELTA, Setting, run

from tacit.accounting.accountant import NO_PRIVACY, no_privacy
from tacit.report.run_folder import environment, to_json

SMALL = {"epochs": 2, "limit": 640, "seeds": [0], "batch_size": 32}


def main(
    title: str, settings: Mapping[str, Setting], arguments: Sequence[str] | None = None
) -> dict:
    """Run each setting with each seed; `--small` is a rehearsal on a few records."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=float, default=None, help="instead of the setting's own")
    parser.add_argument("--only", nargs="+", default=None, help="settings to run, by name")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side")
    parser.add_argument("--evaluations", type=int, default=10, help="points along each curve")
    parser.add_argument("--small", action="store_true", help="640 records, two epochs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="JSON")
    parser.add_argument("--plot", type=Path, default=None, help="PNG")
    asked = parser.parse_args(arguments)
    unknown = set(asked.only or ()) - set(settings)
    if unknown:
        parser.error(f"no settings {sorted(unknown)}; there are {list(settings)}")
    chosen = {n: s for n, s in settings.items() if asked.only is None or n in asked.only}
    seeds, limit = asked.seeds, None
    if asked.small:
        limit = SMALL["limit"]
        chosen = {n: small(s) for n, s in chosen.items()}
    if asked.epochs is not None:
        chosen = {n: replace(s, epochs=asked.epochs) for n, s in chosen.items()}
    jobs = [
        (name, setting, seed, asked.device, asked.evaluations, limit)
        for name, setting in chosen.items()
        for seed in seeds
    ]
    if asked.workers > 1:
        context = multiprocessing.get_context("spawn")
        with context.Pool(asked.workers) as pool:
            results = list(pool.imap_unordered(_job, jobs))
    else:
        results = [_job(job) for job in jobs]
    found = _collected(title, chosen, results)
    found["environment"] = environment()
    print(table(found))
    if asked.out is not None:
        asked.out.write_text(to_json(found) + "\n", encoding="utf-8")
    if asked.plot is not None:
        plot(found, asked.plot)
    return found


def table(found: Mapping) -> str:
    """Mean and spread of accuracy over seeds, with the ε that it really has."""
    lines = [found["title"], f"{'setting':40} {'accuracy %':>16} {'epsilon':>12}"]
    for name, row in found["settings"].items():
        spread = f"{100 * row['mean']:.2f} ± {100 * row['spread']:.2f}"
        lines.append(f"{name:40} {spread:>16} {_epsilon(row['epsilon']):>12}")
    return "\n".join(lines)


def plot(found: Mapping, path: Path) -> None:
    """Test accuracy against epochs, one line a setting, seeds averaged."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for name, row in found["settings"].items():
        paths = [r["path"] for r in row["runs"]]
        epochs = [point[0] for point in paths[0]]
        values = [[100 * p[i][1] for p in paths] for i in range(len(epochs))]
        (line,) = axes.plot(epochs, [statistics.mean(v) for v in values], label=name)
        low, high = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(epochs, low, high, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="epoch", ylabel="test accuracy (%)", title=found["title"])
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _job(job: tuple) -> tuple[str, dict]:
    name, setting, seed, device, evaluations, limit = job
    if device == "cpu":
        torch.set_num_threads(1)
    found = run(setting, seed, device, evaluations, limit)
    if device != "cpu":
        gc.collect()  # a recorded graph holds the memory of its step
        torch.cuda.empty_cache()
    return name, found


def small(setting: Setting) -> Setting:
    sets = min(setting.sets, 2)
    return replace(setting, epochs=SMALL["epochs"], batch_size=SMALL["batch_size"], sets=sets)


def _collected(title: str, settings: Mapping[str, Setting], results: Sequence) -> dict:
    rows = {}
    for name, setting in settings.items():
        own = sorted((r for n, r in results if n == name), key=lambda r: r["seed"])
        rows[name] = {"setting": asdict(setting), **summary(own), "runs": own}
    return {"title": title, "settings": rows}


def summary(runs: Sequence[Mapping]) -> dict:
    """Mean and standard deviation of test accuracy over seeds, and the ε of one run."""
    accuracies = [r["accuracy"] for r in runs]
    spread = statistics.stdev(accuracies) if len(runs) > 1 else 0.0
    return {
        "mean": statistics.mean(accuracies),
        "spread": spread,
        "epsilon": float(runs[0]["epsilon"]),
    }


def _epsilon(value: float) -> str:
    if value == float("inf"):
        return "not private"
    return f"{value:.3g}" + (f" ({NO_PRIVACY})" if no_privacy(value, DELTA) else "")
