"""Held-out accuracy against ε, over several runs.  [Losing Less, Figs. 3, 4 and 9]"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

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
    """From runs, their facts, or their files (run.json, or the folder that it is in).

    At ε each run counts with its last evaluation that had spent no more; the curve begins where
    all runs have one. Runs with the same plan are evaluated at the same ε.
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
