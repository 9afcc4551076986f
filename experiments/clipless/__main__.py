"""*DP-SGD Without Clipping: The Lipschitz Neural Network Way*: its figures, as data.

python -m experiments.clipless --list
python -m experiments.clipless table_7 --small
python -m experiments.clipless 3b --search --workers 6 --seconds 300 --out results/
python -m experiments.clipless 14 --seeds 0 1 2 3 4 --workers 6 --out results/
python -m experiments.clipless --plot-only results/
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.clipless import attacked, figure_3b, norms, table_7
from experiments.clipless.networks import Setting
from experiments.clipless.spaces import ADAPTED, CERTIFIED, KNOWN, PHOTOGRAPHS, UNITS
from experiments.clipless.training import Trial, group_of, small, work
from experiments.runner import Figure, Paper, Selection, main
from tacit.canvas import band, blank, save

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
    """A panel per dataset: medians by architecture, bands from least to largest.

    An architecture has one colour in all panels, and one legend stands below them.
    """
    rows: dict[tuple[str, str], list[Mapping]] = {}
    for name, row in report["settings"].items():
        dataset, architecture = name.rpartition(", epsilon ")[0].split(", ", maxsplit=1)
        rows.setdefault((dataset, architecture), []).append(row)
    datasets = list(dict.fromkeys(dataset for dataset, _ in rows))
    names = list(dict.fromkeys(name for dataset in datasets for name in ARCHITECTURES[dataset]))
    colours = {name: f"C{place}" for place, name in enumerate(names)}
    figure, axes = blank(columns=len(datasets), size=(5.2 * len(datasets), 4.6))
    drawn = {}
    for panel, dataset in zip(axes.flat, datasets, strict=True):
        for name in ARCHITECTURES[dataset]:
            points = rows.get((dataset, name), [])
            if not points:
                continue
            points = sorted(points, key=lambda row: row["setting"]["epsilon"])
            epsilons = [row["setting"]["epsilon"] for row in points]
            shares = [[100 * row[k] for row in points] for k in ("min", "median", "max")]
            look = {"color": colours[name], "marker": "o", "markersize": 3}
            band(panel, epsilons, shares, label=name, **look)
            drawn[name] = next(line for line in panel.lines if line.get_label() == name)
        panel.set_xscale("log", base=2)
        panel.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        panel.set_xlabel("ε")
        panel.set_title(dataset)
        panel.grid(alpha=0.3)
    axes.flat[0].set_ylabel("test accuracy (%)")
    shown = [name for name in names if name in drawn]
    figure.legend(
        [drawn[name] for name in shown], shown, loc="outside lower center", ncols=len(shown)
    )
    save(figure, path)


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
        "attacked": attacked.main,
        "5": speed,
        "norms": norms.main,
        "table_7": table_7.main,
        "ceilings": table_7.ceilings_main,
    },
    small_records=200,
    group=lambda job: group_of(job.setting.task),
)

if __name__ == "__main__":
    main(PAPER)
