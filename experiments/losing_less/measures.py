"""The pictures: accuracy against ε, and what is measured inside a run, as data that is saved.

Not private: these read raw gradients, pre-activations or predictions of training records, as the
paper does, and every picture says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tacit import Records
from tacit.diagnostics import (
    ActivationNorms,
    ClippingAlignment,
    ConfusionHistory,
    Curvature,
    Diagnostic,
    GradientNormHistory,
    GradientNorms,
    Point,
    Spectrum,
    WeightNorms,
    confusion_matrix,
    first_of,
    plot_ablation,
    plot_accuracy_against_epsilon,
    whole_norms,
)

DIAGNOSTICS: dict[str, Callable[[], Diagnostic]] = {
    "logits": ActivationNorms,
    "pre-activations": ActivationNorms,
    "weights": WeightNorms,
    "gradients": functools.partial(GradientNormHistory, max_records=128),
    "alignment": ClippingAlignment,
    "alignment by batch": functools.partial(ClippingAlignment, every=5),
    "curvature": Curvature,
    "confusion": ConfusionHistory,
}


def recorded(diagnostic: Diagnostic) -> list[dict]:
    """What was measured, ready for JSON."""
    return [
        {"step": p.step, "epoch": p.epoch, "value": _as_data(p.value)} for p in diagnostic.points
    ]


def _as_data(value: Any) -> Any:
    if isinstance(value, GradientNorms):
        return whole_norms(value).tolist()
    if isinstance(value, Tensor):
        return value.tolist()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


def restored(name: str, points: list[dict]) -> Diagnostic:
    """A diagnostic with the measurements that were saved."""
    diagnostic = DIAGNOSTICS[name]()
    kind = name.partition(" ")[0]
    make = {
        "gradients": lambda norms: GradientNorms({"all": torch.tensor(norms)}, {}),
        "alignment": lambda cosines: torch.tensor([float(c) for c in cosines]),
        "confusion": torch.tensor,
        "curvature": lambda ends: Spectrum(**{k: float(v) for k, v in ends.items()}),
    }.get(kind, lambda norms: {k: float(v) for k, v in norms.items()})
    diagnostic.points = [Point(p["step"], p["epoch"], make(p["value"])) for p in points]
    return diagnostic


def draw_curves(report: Mapping, path: Path) -> None:
    """Accuracy against ε: a median line, and a band from the least to the largest."""
    groups = {
        name: [{"history": run["path"]} for run in row["runs"]]
        for name, row in report["settings"].items()
        if float(row["epsilon"]) != math.inf
    }
    if groups:
        plot_accuracy_against_epsilon(groups, path, title=report["title"])


def draw_measures(report: Mapping, path: Path) -> None:
    """A picture per dataset and measurement, NAME_DATASET_MEASUREMENT.png; first seeds only."""
    pictures: dict[tuple[str, str], dict[str, Diagnostic]] = {}
    for setting, row in report["settings"].items():
        group, _, label = setting.rpartition(", ")
        for name, points in row["runs"][0]["measured"].items():
            pictures.setdefault((group, name), {})[label] = restored(name, points)
    for (group, name), by_label in pictures.items():
        stem = f"{path.stem}_{group}_{name}".replace(", ", "_").replace(" ", "_")
        options = {"max_norm": 0.1} if name == "gradients" else {}
        next(iter(by_label.values())).draw(by_label, path.with_stem(stem), **options)


def draw_ablation(report: Mapping, path: Path) -> None:
    """Bars for each dataset and kind of features: NAME_DATASET_FEATURES.png."""
    groups: dict[str, dict[str, list[float]]] = {}
    for name, row in report["settings"].items():
        group, _, loss = name.rpartition(", ")
        groups.setdefault(group, {})[loss] = [run["accuracy"] for run in row["runs"]]
    for group, accuracies in groups.items():
        file = path.with_stem(f"{path.stem}_{group.replace(', ', '_')}")
        plot_ablation(accuracies, file, title=group)


def confusion(model: nn.Module, train: Records) -> list[list[int]]:
    """Which class is taken for which, over up to 10,000 training records as in the paper."""
    return confusion_matrix(model, first_of(train, 10_000)).long().tolist()
