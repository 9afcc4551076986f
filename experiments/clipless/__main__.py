"""*DP-SGD Without Clipping: The Lipschitz Neural Network Way*: its figures, as data.

python -m experiments.clipless 14 --seeds 0 1 2 3 4 --workers 6 --out results/
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.clipless import figure_3b, measures, table_7
from experiments.clipless.figure_3b import ADAPTED, CERTIFIED, KNOWN, PHOTOGRAPHS, UNITS
from experiments.clipless.networks import Setting
from experiments.clipless.training import Trial, group_of, small, work
from experiments.results import Line, draw_panels
from experiments.runner import Command, Figure, Paper, Selection, main

EPSILONS = (1.0, 2.0, 4.0, 8.0)
SMALL_FILTERS = replace(CERTIFIED, model="pooled:7:3:64:2")
ARCHITECTURES: dict[str, dict[str, Setting]] = {
    "mnist": {
        "MLP": replace(UNITS, centre=10.0),
        "filters, pooled": SMALL_FILTERS,
        "mixer": replace(CERTIFIED, model="mixer:4:64"),
        "filters about a centre": replace(ADAPTED, batch_size=30_000),
        "linear on scattering features": KNOWN["mnist/scattering"][0],
    },
    "fashion-mnist": {
        "MLP": replace(UNITS, centre=10.0),
        "filters, pooled": SMALL_FILTERS,
        "mixer": replace(CERTIFIED, model="mixer:4:64"),
        "filters about a centre": ADAPTED,
        "linear on scattering features": KNOWN["fashion-mnist/scattering"][0],
    },
    "cifar10": {
        "MLP": CERTIFIED,
        "patches": replace(CERTIFIED, model="patches:4:96"),
        "mixer": replace(CERTIFIED, model="mixer:4:128"),
        "filters, second sphere": replace(PHOTOGRAPHS, batch_size=16_384, steps=200),
        "filters about a centre": KNOWN["cifar10/trained"][0],
        "linear on scattering features": KNOWN["cifar10/scattering"][0],
    },
}


def draw_curves(report: Mapping, path: Path) -> None:
    """A panel per dataset: medians by architecture, bands from least to largest."""
    rows: dict[tuple[str, str], list[Mapping]] = {}
    for name, row in report["settings"].items():
        dataset, architecture = name.rpartition(", epsilon ")[0].split(", ", maxsplit=1)
        rows.setdefault((dataset, architecture), []).append(row)
    panels = {
        dataset: {
            name: line_of(rows[dataset, name]) for name in networks if (dataset, name) in rows
        }
        for dataset, networks in ARCHITECTURES.items()
        if dataset in {of for of, _ in rows}
    }
    draw_panels(panels, path, "ε", ticks=EPSILONS, marker="o", markersize=3)


def line_of(rows: Sequence[Mapping]) -> Line:
    rows = sorted(rows, key=lambda row: row["setting"]["epsilon"])
    shares = [[100 * row[key] for row in rows] for key in ("min", "median", "max")]
    return [row["setting"]["epsilon"] for row in rows], shares


def trials() -> dict[str, Trial]:
    """Every architecture at every ε; filters on CIFAR-10, the slowest, at the end."""
    named = {
        f"{dataset}, {name}, epsilon {epsilon:g}": Trial(
            f"{dataset}/{'pixels' if setting.features == 'pixels' else 'scattering'}",
            setting,
            epsilon,
        )
        for dataset, networks in ARCHITECTURES.items()
        for name, setting in networks.items()
        for epsilon in EPSILONS
    }
    return dict(sorted(named.items(), key=lambda item: is_slow(item[1])))


def is_slow(trial: Trial) -> bool:
    slow = trial.setting.model.startswith(("convolution", "adapted"))
    return trial.dataset == "cifar10" and slow


def speed(paper: Paper, arguments: Sequence[str]) -> None:
    """Figure 5: speed and memory against the batch size (benchmarks/clipless_speed.py)."""
    folder = Path(__file__).parents[2] / "benchmarks"
    sys.path.insert(0, str(folder))
    sys.argv[1:] = arguments
    runpy.run_path(str(folder / "clipless_speed.py"), run_name="__main__")


FIGURES = {
    "14": Figure(
        "Figures 14 and 16: accuracy against epsilon by architecture",
        trials(),
        "MNIST, Fashion-MNIST and CIFAR-10. Each architecture keeps one setting per dataset, from "
        "the search at ε = 3 or near it, with the noise that each ε needs; the test records are "
        "read once per run. Networks on pixels are trained end to end.",
    ),
}
PAPER = Paper(
    "DP-SGD Without Clipping",
    FIGURES,
    work,
    small,
    draw_curves,
    (Selection("14", (0, 1, 2, 3, 4)),),
    commands={
        "3b": figure_3b.figure_3b,
        "table_1": figure_3b.table_1,
        "attacked": measures.under_attack,
        "5": Command(None, speed),
        "norms": measures.norms,
        "table_7": table_7.main,
        "ceilings": table_7.ceilings,
    },
    small_records=200,
    group=lambda job: group_of(job.setting.task),
)

if __name__ == "__main__":
    main(PAPER)
