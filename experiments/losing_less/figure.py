"""What every figure's file shares: its runs side by side, a table, JSON and a plot."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from runs import Setting, run

from tacit.diagnostics.accuracy_curve import plot_accuracy_against_epsilon
from tacit.report.run_folder import environment, to_json

SMALL_RECORDS = 96
Draw = Callable[[Mapping, Path], None]


def main(
    title: str,
    settings: Mapping[str, Setting],
    arguments: Sequence[str] | None = None,
    *,
    draw: Draw | None = None,
    held_out: bool = False,
) -> dict:
    """Run each setting with each seed; `--small` is a rehearsal on a few records.

    Accuracy is on the test records, or with `held_out` on training records that were kept back.
    """
    asked = options(title, settings, arguments)
    chosen = chosen_of(settings, asked)
    limit = SMALL_RECORDS if asked.small else None
    jobs = [
        (name, setting, seed, asked.device, asked.evaluations, limit, held_out)
        for name, setting in chosen.items()
        for seed in asked.seeds
    ]
    if asked.workers > 1:
        context = multiprocessing.get_context("spawn")
        with context.Pool(asked.workers) as pool:
            results = list(pool.imap_unordered(_job, jobs))
    else:
        results = [_job(job) for job in jobs]
    found = collected(title, chosen, results)
    found["looked at"] = "held-out training records" if held_out else "test records"
    found["environment"] = environment()
    print(table(found))
    if asked.out is not None:
        asked.out.write_text(to_json(found) + "\n", encoding="utf-8")
    if asked.plot is not None:
        (draw or plot)(found, asked.plot)
    return found


def options(
    title: str, names: Mapping[str, object], arguments: Sequence[str] | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=None, help="settings to run, by name")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side")
    parser.add_argument("--evaluations", type=int, default=20, help="points along each curve")
    parser.add_argument("--small", action="store_true", help="96 records, three steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="JSON")
    parser.add_argument("--plot", type=Path, default=None, help="PNG")
    asked = parser.parse_args(arguments)
    unknown = set(asked.only or ()) - set(names)
    if unknown:
        parser.error(f"no settings {sorted(unknown)}; there are {list(names)}")
    return asked


def chosen_of(settings: Mapping[str, Setting], asked: argparse.Namespace) -> dict[str, Setting]:
    chosen = {n: s for n, s in settings.items() if asked.only is None or n in asked.only}
    return {n: small(s) for n, s in chosen.items()} if asked.small else chosen


def small(setting: Setting) -> Setting:
    """Three steps on a few records, with the noise that those need for the same ε."""
    return replace(setting, batch_size=16, steps=3, noise_multiplier=None)


def table(found: Mapping) -> str:
    """Least, median and largest accuracy over seeds, and ε."""
    lines = [found["title"], f"{'setting':44} {'min':>6} {'median':>7} {'max':>6} {'epsilon':>9}"]
    for name, row in found["settings"].items():
        low, middle, high = (f"{100 * row[key]:.2f}" for key in ("min", "median", "max"))
        lines.append(f"{name:44} {low:>6} {middle:>7} {high:>6} {row['epsilon']:>9.3g}")
    return "\n".join(lines)


def plot(found: Mapping, path: Path) -> None:
    """Accuracy against ε: a median line, and a band from the least to the largest."""
    groups = {
        name: [{"history": r["path"]} for r in row["runs"]]
        for name, row in found["settings"].items()
        if row["epsilon"] != float("inf")
    }
    plot_accuracy_against_epsilon(groups, path, title=found["title"])


def _job(job: tuple) -> tuple[str, dict]:
    name, setting, seed, device, evaluations, limit, held_out = job
    if device == "cpu":
        torch.set_num_threads(1)
    return name, run(setting, seed, device, evaluations, limit, held_out=held_out)


def collected(title: str, settings: Mapping[str, Setting], results: Sequence) -> dict:
    rows = {}
    for name, setting in settings.items():
        own = sorted((r for n, r in results if n == name), key=lambda r: r["seed"])
        accuracies = [r["accuracy"] for r in own]
        rows[name] = {
            "setting": asdict(setting),
            "min": min(accuracies),
            "median": statistics.median(accuracies),
            "max": max(accuracies),
            "mean": statistics.mean(accuracies),
            "spread": statistics.stdev(accuracies) if len(own) > 1 else 0.0,
            "epsilon": own[0]["epsilon"],
            "runs": own,
        }
    return {"title": title, "settings": rows}
