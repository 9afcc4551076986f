"""Figures 14 and 16: accuracy against ε by architecture, on MNIST, Fashion-MNIST and CIFAR-10.

Each architecture keeps one setting a dataset, from the search at ε = 3 or near it, with the noise
that each ε asks for; the test records are looked at once a run. Networks on pixels are trained end
to end. A second call goes on where the first was stopped.

    python experiments/clipless/figures_14_16.py --workers 6 --out curves.jsonl --plot curves.png
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from figure_3b import lines_of
from image_runs import Job
from image_search import group_of, in_small
from image_settings import Setting
from image_spaces import ADAPTED, CERTIFIED, KNOWN, PHOTOGRAPHS, UNITS
from image_workers import each_result

from tacit.canvas import blank, save
from tacit.report.run_folder import source, to_json

SEEDS = (0, 1, 2, 3, 4)
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


def in_order() -> list[Job]:
    """A seed at a time, one dataset's together; filters on CIFAR-10, the slowest, at the end."""
    jobs = [
        Job(f"{dataset}/{_kind(setting)}", setting, epsilon, seed, held_out=False)
        for seed in SEEDS
        for dataset, networks in ARCHITECTURES.items()
        for setting in networks.values()
        for epsilon in EPSILONS
    ]
    return sorted(jobs, key=lambda job: (_is_slow(job), job.seed, group_of(job.task)))


def _is_slow(job: Job) -> bool:
    return job.dataset == "cifar10" and job.setting.model.startswith(("convolution", "adapted"))


def _kind(setting: Setting) -> str:
    return "pixels" if setting.features == "pixels" else "scattering"


def architecture(dataset: str, setting: Setting) -> str:
    return next(name for name, known in ARCHITECTURES[dataset].items() if known == setting)


def rows_of(lines: Sequence[Mapping]) -> list[dict]:
    """Least, median, largest, mean and std over seeds, by dataset, architecture and ε."""
    found: dict[tuple[str, str, float], list[Mapping]] = {}
    for line in lines:
        if "accuracy" in line:
            dataset = line["task"].partition("/")[0]
            found.setdefault((dataset, line["architecture"], line["target_epsilon"]), []).append(
                line
            )
    rows = []
    for (dataset, name, epsilon), runs in sorted(found.items()):
        shares = [run["accuracy"] for run in runs]
        rows.append(
            {
                "dataset": dataset,
                "architecture": name,
                "epsilon": epsilon,
                "seeds": sorted(run["seed"] for run in runs),
                "least": min(shares),
                "median": statistics.median(shares),
                "largest": max(shares),
                "mean": statistics.mean(shares),
                "std": statistics.stdev(shares) if len(shares) > 1 else 0.0,
            }
        )
    return rows


def table(rows: Sequence[Mapping]) -> str:
    """In Markdown: a row an architecture, a column an ε."""
    columns = sorted({row["epsilon"] for row in rows})
    cells: dict[tuple[str, str], dict[float, str]] = {}
    for row in rows:
        said = f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f} ({len(row['seeds'])})"
        cells.setdefault((row["dataset"], row["architecture"]), {})[row["epsilon"]] = said
    head = "| | " + " | ".join(f"ε = {epsilon:g}" for epsilon in columns) + " |"
    body = [
        f"| {dataset}, {name} | " + " | ".join(found.get(e, "–") for e in columns) + " |"
        for (dataset, name), found in cells.items()
    ]
    return "\n".join([head, "|---" * (len(columns) + 1) + "|", *body])


def draw(rows: Sequence[Mapping], path: Path) -> None:
    """A panel a dataset: medians by architecture, bands from least to largest.

    An architecture has one colour in all panels, and one legend stands below them.
    """
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    names = list(dict.fromkeys(name for dataset in datasets for name in ARCHITECTURES[dataset]))
    colours = {name: f"C{place}" for place, name in enumerate(names)}
    figure, axes = blank(columns=len(datasets), size=(5.2 * len(datasets), 4.6))
    drawn = {}
    for panel, dataset in zip(axes.flat, datasets, strict=True):
        for name in ARCHITECTURES[dataset]:
            points = [r for r in rows if (r["dataset"], r["architecture"]) == (dataset, name)]
            if not points:
                continue
            epsilons = [row["epsilon"] for row in points]
            least, middle, most = (
                [100 * row[which] for row in points] for which in ("least", "median", "largest")
            )
            look = {"color": colours[name], "marker": "o", "markersize": 3}
            (drawn[name],) = panel.plot(epsilons, middle, label=name, **look)
            panel.fill_between(epsilons, least, most, alpha=0.2, color=colours[name])
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


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--plot", type=Path, help="picture of all that is in the file")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no run begins after")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--workers", type=int, default=1, help="processes; 0 runs nothing")
    parser.add_argument("--records", type=int, help="use so few records and three steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(arguments)
    lines = lines_of(asked.out) if asked.out.exists() else []
    done = {_key(line) for line in lines if "error" not in line}
    named = {job: architecture(job.dataset, job.setting) for job in in_order()}
    wanted = {
        job: name
        for job, name in named.items()
        if job.seed in asked.seeds and _key({**job.facts(), "architecture": name}) not in done
    }
    if asked.records is not None:
        wanted = {in_small(job, asked.records): name for job, name in wanted.items()}
    todo = iter(wanted)
    ends = time.perf_counter() + asked.seconds
    if asked.workers:
        results = each_result(
            lambda _: next(todo, None), asked.workers, ends, asked.device, asked.records
        )
        for job, found in results:
            line = {**job.facts(), "architecture": wanted[job], **found, "source": source()}
            lines.append(line)
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(json.loads(to_json(line)), ensure_ascii=False) + "\n")
            said = line.get("accuracy", line.get("error"))
            print(job.task, line["architecture"], job.epsilon, job.seed, said, flush=True)
    rows = rows_of(lines)
    print(table(rows))
    if asked.plot is not None:
        draw(rows, asked.plot)
    return rows


def _key(line: Mapping) -> tuple:
    return line["task"], line["architecture"], line["target_epsilon"], line["seed"]


if __name__ == "__main__":
    main()
