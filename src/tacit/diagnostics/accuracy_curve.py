"""Held-out accuracy against ε over several runs, and ablations.  [Losing Less, Figs. 3, 4 and 9]"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tacit.canvas import blank, save
from tacit.training.run import Run

AnyRun = Run | Mapping[str, Any] | str | os.PathLike[str]


@dataclass(frozen=True)
class AccuracyCurve:
    """Least, median and largest accuracy of some runs at each ε."""

    epsilons: tuple[float, ...]
    least: tuple[float, ...]
    median: tuple[float, ...]
    largest: tuple[float, ...]
    num_runs: int


def accuracy_curve(runs: Sequence[AnyRun]) -> AccuracyCurve:
    """The curve of runs, their facts, or their files (run.json, or its folder).

    At ε each run counts with its last evaluation that had spent no more; the curve begins where
    all runs have one.
    """
    histories = [_history(run) for run in runs]
    if not histories or not all(histories):
        raise ValueError(
            f"{len(histories)} runs, {sum(map(bool, histories))} of them evaluated on the way; "
            "give at least one, trained with evaluate_on=records"
        )
    begin = max(history[0][0] for history in histories)
    grid = sorted({e for history in histories for e, _ in history if e >= begin})
    rows = [[_at(history, e) for history in histories] for e in grid]
    return AccuracyCurve(
        tuple(grid),
        tuple(min(row) for row in rows),
        tuple(median(row) for row in rows),
        tuple(max(row) for row in rows),
        len(histories),
    )


def _history(run: AnyRun) -> list[tuple[float, float]]:
    if isinstance(run, Run):
        found = [(e.epsilon, e.accuracy) for e in run.history]
    else:
        facts = run if isinstance(run, Mapping) else _read(Path(run))
        found = [(float(p["epsilon"]), p["accuracy"]) for p in facts["history"]]
    points = [(epsilon, float(share)) for epsilon, share in found if share is not None]
    if len(points) < len(found):
        raise ValueError(
            "a run's history has no accuracy, since its task has no classes; give runs of "
            "classifiers"
        )
    return sorted(points, key=lambda point: point[0])


def _read(path: Path) -> dict[str, Any]:
    file = path / "run.json" if path.is_dir() else path
    facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return facts


def _at(history: list[tuple[float, float]], epsilon: float) -> float:
    return [accuracy for e, accuracy in history if e <= epsilon][-1]


def plot_accuracy_against_epsilon(
    groups: Mapping[str, Sequence[AnyRun]], path: str | os.PathLike[str], *, title: str = ""
) -> None:
    """A median line and a band from least to largest for each group of runs, by name."""
    figure, axes = blank()
    panel = axes[0, 0]
    for name, runs in groups.items():
        curve = accuracy_curve(runs)
        least, middle, most = (
            [100 * share for share in shares]
            for shares in (curve.least, curve.median, curve.largest)
        )
        label = f"{name} ({curve.num_runs} runs)"
        (line,) = panel.plot(curve.epsilons, middle, label=label)
        panel.fill_between(curve.epsilons, least, most, alpha=0.2, color=line.get_color())
        for edge in (least, most):
            panel.plot(curve.epsilons, edge, linewidth=0.6, color=line.get_color())
    panel.set_xlabel("ε spent")
    panel.set_ylabel("held-out accuracy (%)")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, loc="lower right", title="median; band: least to largest")
    if title:
        panel.set_title(title)
    save(figure, path)


def plot_ablation(
    accuracies: Mapping[str, Sequence[float]], path: str | os.PathLike[str], *, title: str = ""
) -> None:
    """The median accuracy of each variant, whiskers from least to largest, and a dot per run."""
    if not accuracies or not all(accuracies.values()):
        raise ValueError("give at least one accuracy for each variant")
    figure, axes = blank(size=(max(4.0, 1.2 + 1.1 * len(accuracies)), 4.2))
    panel = axes[0, 0]
    for place, values in enumerate(accuracies.values()):
        percent = [100 * v for v in values]
        middle = median(percent)
        panel.bar(place, middle, width=0.6, color="tab:blue", alpha=0.5)
        spread = [[middle - min(percent)], [max(percent) - middle]]
        panel.errorbar(place, middle, yerr=spread, color="black", capsize=5)
        panel.plot([place] * len(percent), percent, ".", color="black", markersize=4)
        panel.annotate(
            f"{middle:.1f}", (place, max(percent)), (0, 5), textcoords="offset points",
            ha="center", fontsize=8,
        )  # fmt: skip
    lowest = min(min(values) for values in accuracies.values())
    highest = max(max(values) for values in accuracies.values())
    # Bars that all end near the top of an axis from 0 cannot be told apart.
    margin = max(100 * (highest - lowest), 1.0)
    bottom = max(0.0, 100 * lowest - margin)
    panel.set_ylim(bottom, min(102.0, 100 * highest + 0.35 * margin))
    cut = f"\nthe axis begins at {bottom:.3g}%" if bottom else ""
    labels = [f"{name}\n({len(values)} runs)" for name, values in accuracies.items()]
    panel.set_xticks(range(len(labels)), labels, fontsize=8)
    panel.set_ylabel("held-out accuracy (%)")
    panel.grid(axis="y", alpha=0.3)
    panel.set_title(f"bars: median; whiskers: least and largest{cut}", fontsize=8)
    save(figure, path, title)
