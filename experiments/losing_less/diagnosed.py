"""What the figures about the inside of a run share: the same run under both losses, watched.

Not private: these read raw gradients, pre-activations or predictions of training records, as the
paper does, and say so on top of each picture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import figure
import runs
from runs import Setting, paper_setting
from torch import Tensor

from tacit.diagnostics import Diagnostic
from tacit.diagnostics.gradient_norms import GradientNorms, whole_norms
from tacit.report.run_folder import environment, to_json

Watchers = Mapping[str, Callable[[], Diagnostic]]
Drawing = Callable[[dict[str, Any], Path], None]
LOSSES = {"cross-entropy": "cross-entropy", "tailored": "tailored"}


def both_losses(*datasets: str, epochs: float | None = None) -> dict[str, Setting]:
    """CE-T-CNN and O-T-CNN of the paper, by dataset; `epochs` ends them sooner."""
    found = {}
    for dataset in datasets:
        for label, loss in LOSSES.items():
            setting = paper_setting(dataset, "pixels", loss)
            if epochs is not None:
                per_epoch = runs.RECIPES[dataset, "pixels"].sampling.rate
                setting = dataclasses.replace(setting, steps=max(1, round(epochs / per_epoch)))
            found[f"{dataset}, {label}"] = setting
    return found


def main(
    title: str,
    settings: Mapping[str, Setting],
    watchers: Watchers,
    drawings: Mapping[str, Drawing],
    arguments: Sequence[str] | None = None,
) -> dict:
    """One run a setting and seed, with its watchers; a picture a dataset, watcher and seed.

    `--plot fig.png` writes fig_DATASET_WATCHER.png for the first seed.
    """
    asked = figure.options(title, settings, arguments)
    limit = figure.SMALL_RECORDS if asked.small else None
    kept: dict[str, dict[str, dict[str, Diagnostic]]] = {}
    rows: dict[str, list[dict]] = {}
    for name, setting in figure.chosen_of(settings, asked).items():
        dataset, _, label = name.partition(", ")
        for seed in asked.seeds:
            watching = {kind: make() for kind, make in watchers.items()}
            found = runs.run(setting, seed, asked.device, 1, limit, callbacks=watching.values())
            found["seen"] = {kind: plain(each) for kind, each in watching.items()}
            rows.setdefault(name, []).append(found)
            if seed == asked.seeds[0]:
                for kind, each in watching.items():
                    kept.setdefault(dataset, {}).setdefault(kind, {})[label] = each
    report = {"title": title, "settings": rows, "environment": environment()}
    for name, found_runs in rows.items():
        print(name, f"{100 * found_runs[0]['accuracy']:.2f}%", f"ε {found_runs[0]['epsilon']:.3g}")
    if asked.out is not None:
        asked.out.write_text(to_json(report) + "\n", encoding="utf-8")
    if asked.plot is not None:
        for dataset, kinds in kept.items():
            for kind, by_label in kinds.items():
                file = asked.plot.with_stem(f"{asked.plot.stem}_{dataset}_{kind}")
                drawings[kind](by_label, file)
    return report


def plain(seen: Diagnostic) -> list[dict]:
    """What was measured, ready for JSON."""
    return [{"step": p.step, "epoch": p.epoch, "value": _value(p.value)} for p in seen.points]


def _value(value: object) -> object:
    if isinstance(value, GradientNorms):
        return whole_norms(value).tolist()
    if isinstance(value, Tensor):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value
