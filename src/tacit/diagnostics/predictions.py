"""What a classifier gets right: which class is taken for which, and accuracy against ε.

[Losing Less, Figs. 3, 4, 8, 9 and 13]
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.canvas import band, blank, save
from tacit.diagnostics.diagnostic import Diagnostic, save_runs, shown_points
from tacit.pytrees import call_model, logits_of, tensors_of
from tacit.records import Records
from tacit.statistics.tracking import evaluating
from tacit.training.evaluation import pieces_of, two_classes
from tacit.training.run import Run

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer


@torch.no_grad()
def confusion_matrix(model: nn.Module, records: Records, *, batch_size: int = 2048) -> Tensor:
    """How many records of class i (row) were taken for class j (column), in evaluation mode.

    **Not private: reads predictions.** One output stands for two classes, by its sign.
    """
    with evaluating(model):
        pieces = pieces_of(records, batch_size, model)
        parts = [logits_of(call_model(model, piece.inputs)) for piece in pieces]
    # One column at a time, if it is read when it is needed.
    targets_of_records = [column[:].cpu() for column in tensors_of(records.targets)]
    logits = [part for part in parts if part is not None]
    if len(targets_of_records) != 1 or len(logits) != len(parts):
        raise ValueError(
            "a confusion matrix needs one tensor of logits and one of targets; give a model that "
            "returns the scores of one set of classes, and records with one class each"
        )
    (targets,) = targets_of_records
    outputs = torch.cat([part.reshape(len(part), -1) for part in logits]).cpu()
    if outputs.shape[1] == 1:
        if not two_classes(targets):
            raise ValueError(
                "one output per record, and targets other than 0 and 1 or −1 and +1: a regression "
                "has no classes to confuse; give records with classes"
            )
        predicted, true = (outputs[:, 0] > 0).long(), (targets.flatten() > 0).long()
    else:
        predicted, true = outputs.argmax(dim=1), targets.long().flatten()
    K = max(outputs.shape[1], 2)
    if len(true) != len(predicted) or (
        len(true) and not 0 <= int(true.min()) <= int(true.max()) < K
    ):
        raise ValueError(
            f"{len(predicted)} records of {K} classes, with {len(true)} targets from "
            f"{int(true.min())} to {int(true.max())}; give one class below {K} per record"
        )
    return torch.bincount(true * K + predicted, minlength=K * K).reshape(K, K).cpu()


def plot_confusion(
    runs: Mapping[str, Diagnostic[Tensor]],
    path: str | os.PathLike[str],
    *,
    classes: Sequence[str] | None = None,
) -> None:
    """A row per run, a column for up to four measurements, the first and the last among them.

    Each row of a matrix is divided by its sum, in percent: the diagonal is the accuracy by class.
    """
    shown = shown_points(min(len(run.points) for run in runs.values()))
    figure, axes = blank(len(runs), len(shown), (3.3 * len(shown) + 0.4, 3.4 * len(runs) + 0.5))
    figure.set_layout_engine("compressed")  # panels of a fixed shape would overlap otherwise
    for row, (label, run) in zip(axes, runs.items(), strict=True):
        for panel, place in zip(row, shown, strict=True):
            point = run.points[place]
            counts = point.value.double()
            shares = (100 * counts / counts.sum(dim=1, keepdim=True).clamp_min(1)).numpy()
            panel.imshow(shares, vmin=0, vmax=100, cmap="Blues")
            for (i, j), share in np.ndenumerate(shares):
                if share >= 0.5:
                    colour = "white" if share > 55 else "black"
                    panel.text(
                        j, i, f"{share:.0f}", ha="center", va="center", fontsize=6, color=colour
                    )
            right = float(counts.diagonal().sum() / counts.sum().clamp_min(1))
            name = f"{label}, " if label else ""
            panel.set_title(f"{name}epoch {point.epoch:.3g}: {right:.1%}", fontsize=9)
            names = classes or [str(k) for k in range(len(shares))]
            panel.set_xticks(range(len(shares)), names, fontsize=7, rotation=90 if classes else 0)
            panel.set_yticks(range(len(shares)), names, fontsize=7)
        row[0].set_ylabel("true class")
    for panel in axes[-1]:
        panel.set_xlabel("taken for")
    save_runs(figure, path, runs)


@dataclass(eq=False, repr=False, kw_only=True)
class ConfusionHistory(Diagnostic[Tensor]):
    """`confusion_matrix` by epoch. **Not private: reads predictions.**"""

    reads = "predictions"
    draw = staticmethod(plot_confusion)
    max_records: int = 10_000

    def measure(self, trainer: Trainer, records: Records) -> Tensor:
        return confusion_matrix(trainer.model, records)


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
    rows = [[[a for at, a in history if at <= e][-1] for history in histories] for e in grid]
    return AccuracyCurve(
        tuple(grid),
        tuple(min(row) for row in rows),
        tuple(median(row) for row in rows),
        tuple(max(row) for row in rows),
        len(histories),
    )


def _history(run: AnyRun) -> list[tuple[float, float]]:
    if isinstance(run, Run):
        history = [evaluation.facts() for evaluation in run.history]
    elif isinstance(run, Mapping):
        history = run["history"]
    else:
        file = Path(run, "run.json") if Path(run).is_dir() else Path(run)
        history = json.loads(file.read_text(encoding="utf-8"))["history"]
    if any(point["accuracy"] is None for point in history):
        raise ValueError(
            "a run's history has no accuracy, since its task has no classes; give runs of "
            "classifiers"
        )
    points = [(float(point["epsilon"]), float(point["accuracy"])) for point in history]
    return sorted(points, key=lambda point: point[0])


def plot_accuracy_against_epsilon(
    groups: Mapping[str, Sequence[AnyRun]], path: str | os.PathLike[str], *, title: str = ""
) -> None:
    """A median line and a band from least to largest for each group of runs, by name."""
    figure, axes = blank()
    panel = axes[0, 0]
    for name, runs in groups.items():
        curve = accuracy_curve(runs)
        shares = (curve.least, curve.median, curve.largest)
        rows = [[100 * share for share in row] for row in shares]
        band(panel, curve.epsilons, rows, label=f"{name} ({curve.num_runs} runs)")
    panel.set(xlabel="ε spent", ylabel="held-out accuracy (%)")
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
