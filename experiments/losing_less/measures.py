"""The pictures: accuracy against ε, and what is measured inside a run, as data that is saved.

Not private: these read raw gradients, pre-activations or predictions of training records, as the
paper does, and every picture says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tacit import Records, diagnostics
from tacit.diagnostics import Diagnostic, GradientNorms, Point, Spectrum

DIAGNOSTICS: dict[str, Callable[[], Diagnostic]] = {
    "logits": diagnostics.ActivationNorms,
    "pre-activations": diagnostics.ActivationNorms,
    "weights": diagnostics.WeightNorms,
    "gradients": functools.partial(diagnostics.GradientNormHistory, max_records=128),
    "alignment": diagnostics.ClippingAlignment,
    "alignment by batch": functools.partial(diagnostics.ClippingAlignment, every=5),
    "curvature": diagnostics.Curvature,
    "confusion": diagnostics.ConfusionHistory,
}


def recorded(diagnostic: Diagnostic) -> list[dict]:
    """What was measured, ready for JSON."""
    return [
        {"step": p.step, "epoch": p.epoch, "value": _as_data(p.value)} for p in diagnostic.points
    ]


def _as_data(value: Any) -> Any:
    if isinstance(value, GradientNorms):
        return diagnostics.whole_norms(value).tolist()
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
    """Accuracy against ε, a picture per dataset: a median line, a band from least to largest."""
    groups: dict[str, dict[str, list[dict]]] = {}
    for name, row in report["settings"].items():
        if float(row["epsilon"]) != math.inf:
            dataset, _, label = name.replace("/", ", ").partition(", ")
            runs = [{"history": run["path"]} for run in row["runs"]]
            groups.setdefault(dataset, {})[label] = runs
    for dataset, by_label in groups.items():
        title = f"{report['title']}\n{dataset}"
        diagnostics.plot_accuracy_against_epsilon(by_label, _beside(path, dataset), title=title)


def draw_measures(report: Mapping, path: Path) -> None:
    """A picture per dataset and measurement; of first seeds only."""
    pictures: dict[tuple[str, str], dict[str, Diagnostic]] = {}
    for group, label, measured in _measurements(report):
        for name, points in measured.items():
            pictures.setdefault((group, name), {})[label] = restored(name, points)
    for (group, name), by_label in pictures.items():
        options = {"max_norm": 0.1} if name == "gradients" else {}
        diagnostic = next(iter(by_label.values()))
        diagnostic.draw(by_label, _beside(path, f"{group}_{name}"), **options)


def _measurements(report: Mapping) -> Iterator[tuple[str, str, Mapping]]:
    """The group, the label and the measurements of each setting's first run.

    In the records of 2026-11 a setting is a list of runs or, for confusion, a group of them.
    """
    for name, row in report["settings"].items():
        group, _, label = name.rpartition(", ")
        if isinstance(row, list):
            yield group, label, row[0]["seen"]
        elif "runs" in row:
            yield group, label, row["runs"][0]["measured"]
        else:
            for label, run in row.items():
                yield name, label, {"confusion": [{**run["path"][-1], "value": run["seen"]}]}


def draw_bars(report: Mapping, path: Path, before_label: str = ", ") -> None:
    """Bars of accuracy; settings whose names agree before the label share a picture."""
    groups: dict[str, dict[str, list[float]]] = {}
    for name, row in report["settings"].items():
        group, _, label = name.rpartition(before_label)
        groups.setdefault(group, {})[label] = [run["accuracy"] for run in row["runs"]]
    for group, accuracies in groups.items():
        diagnostics.plot_ablation(accuracies, _beside(path, group), title=group)


def _beside(path: Path, name: str) -> Path:
    return path.with_stem(f"{path.stem}_{name}".replace(", ", "_").replace(" ", "_"))


def confusion(model: nn.Module, train: Records) -> list[list[int]]:
    """Which class is taken for which, over up to 10,000 training records as in the paper."""
    return diagnostics.confusion_matrix(model, diagnostics.first_of(train, 10_000)).long().tolist()
