"""What Figures 8 and 13 share: confusion on training records, with and without privacy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import figure
import runs
import torch
from recipes import RECIPES, SIZES
from runs import Setting, paper_setting
from torch import nn

from tacit import Records
from tacit.diagnostics import ConfusionHistory, confusion_matrix
from tacit.diagnostics.confusion import plot_confusion
from tacit.diagnostics.diagnostic import Point, first_of
from tacit.report.run_folder import environment, to_json


def settings(dataset: str, epochs: float) -> dict[str, Setting]:
    """O-T-CNN, CE-T-CNN, and SGD without privacy on the same network for as long."""
    steps = max(1, round(epochs / RECIPES[dataset, "pixels"].sampling.rate))
    private = {
        name: replace(paper_setting(dataset, "pixels", loss), steps=steps)
        for name, loss in (("tailored", "tailored"), ("cross-entropy", "cross-entropy"))
    }
    plain_sgd = Setting(
        dataset,
        batch_size=128,
        steps=max(1, round(epochs * SIZES[dataset] / 128)),
        learning_rate=0.05,
        private=False,
    )
    return {**private, "SGD, not private": plain_sgd}


def main(
    title: str,
    datasets: Sequence[str],
    epochs: Sequence[int],
    arguments: Sequence[str] | None = None,
) -> dict:
    """A run to each epoch for each kind; the matrix at its end. `--plot` adds the names."""
    names = {f"{dataset}, epoch {epoch}": None for dataset in datasets for epoch in epochs}
    asked = figure.options(title, names, arguments)
    limit = figure.SMALL_RECORDS if asked.small else None
    rows: dict[str, dict] = {}
    for dataset in datasets:
        for epoch in epochs:
            name = f"{dataset}, epoch {epoch}"
            if asked.only is not None and name not in asked.only:
                continue
            rows[name] = {}
            for kind, setting in settings(dataset, epoch).items():
                used = figure.small(setting) if asked.small else setting
                rows[name][kind] = runs.run(
                    used, asked.seeds[0], asked.device, 1, limit, look=_matrix
                )
            if asked.plot is not None:
                _draw(rows[name], asked.plot.with_stem(f"{asked.plot.stem}_{dataset}_{epoch}"))
    report = {"title": title, "settings": rows, "environment": environment()}
    if asked.out is not None:
        asked.out.write_text(to_json(report) + "\n", encoding="utf-8")
    return report


def _matrix(model: nn.Module, train: Records) -> list[list[int]]:
    """Of up to 10,000 training records, as the paper does."""
    return confusion_matrix(model, first_of(train, 10_000)).long().tolist()


def _draw(kinds: dict[str, dict], path: Path) -> None:
    histories = {}
    for kind, found in kinds.items():
        histories[kind] = ConfusionHistory()
        last = found["path"][-1]
        matrix = torch.tensor(found["seen"])
        histories[kind].points = [Point(last["step"], last["epoch"], matrix)]
    plot_confusion(histories, path)
