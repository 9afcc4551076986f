"""Results on disk, their summaries and tables, and the curves that most figures draw of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tacit.accounting.gaussian_dp import NO_PRIVACY, no_privacy
from tacit.canvas import band, blank, save
from tacit.report.folder_files import to_json
from tacit.report.run_folder import environment

DELTA = 1e-5
Line = tuple[Sequence[float], Sequence[Sequence[float]]]  # x, and the rows of `canvas.band`


def plain(value: Mapping) -> dict:
    """The value as JSON gives it back."""
    return json.loads(to_json(value))


def write(path: Path | None, report: Mapping | Sequence) -> None:
    """The report as JSON, if there is a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(report) + "\n", encoding="utf-8")


def append(path: Path, text: str) -> None:
    with path.open("a+b") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        cut_short = size and file.read(1) != b"\n"
        file.write((b"\n" if cut_short else b"") + text.encode() + b"\n")


def read_lines(path: Path) -> list[dict]:
    """The lines of a results file; a line that a kill has cut short is left out."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            print(f"{path}: line {number} is cut short and left out")
    return lines


def file_stem(key: str) -> str:
    return f"figure_{key}" if key[0].isdigit() else key


def collected(title: str, lines: Sequence[Mapping]) -> dict:
    """All runs by setting, with a summary of each."""
    rows: dict[str, dict] = {}
    for line in lines:
        if "error" not in line:
            row = rows.setdefault(line["name"], {"setting": line["setting"], "runs": []})
            row["runs"].append({k: v for k, v in line.items() if k not in _NOT_OF_A_RUN})
    for row in rows.values():
        row["runs"].sort(key=lambda run: run["seed"])
        row |= summary(row["runs"])
    return plain({"title": title, "settings": rows, "environment": environment()})


_NOT_OF_A_RUN = ("figure", "name", "setting", "source")


def summary(runs: Sequence[Mapping]) -> dict:
    """Accuracy over seeds: least, median, largest, mean and standard deviation; and ε."""
    accuracies = [run["accuracy"] for run in runs]
    return {
        "min": min(accuracies),
        "median": statistics.median(accuracies),
        "max": max(accuracies),
        "mean": statistics.mean(accuracies),
        "spread": statistics.stdev(accuracies) if len(runs) > 1 else 0.0,
        "epsilon": runs[0]["epsilon"],
    }


def table(report: Mapping) -> str:
    """Accuracy in percent over seeds, with the ε that each setting really has."""
    heads = f"{'setting':48} {'min':>6} {'median':>6} {'max':>6} {'mean ± spread':>15} epsilon"
    lines = [report["title"], heads]
    for name, row in report["settings"].items():
        shares = " ".join(f"{100 * row[key]:6.2f}" for key in ("min", "median", "max"))
        mean = f"{100 * row['mean']:.2f} ± {100 * row['spread']:.2f}"
        lines.append(f"{name:48} {shares} {mean:>15} {_epsilon(float(row['epsilon']))}")
    return "\n".join(lines)


def _epsilon(value: float) -> str:
    if value == math.inf:
        return "not private"
    return f"{value:.3g}" + (f" ({NO_PRIVACY})" if no_privacy(value, DELTA) else "")


def draw_panels(
    panels: Mapping[str, Mapping[str, Line]],
    path: Path,
    xlabel: str,
    title: str | None = None,
    ticks: Sequence[float] = (),
    **look: Any,
) -> None:
    """Accuracy in percent: a panel per group and, by label, a line in its band.

    A label has one colour in all panels, and one legend stands beside them. `ticks`, if any, stand
    on a scale of powers of two.
    """
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    figure, axes = blank(columns=len(panels), size=(5.5 * len(panels) + 3.5, 4.5))
    legend = {}
    for panel, (group, lines) in zip(axes.flat, panels.items(), strict=True):
        for label, (x, rows) in lines.items():
            band(panel, x, rows, label=label, color=f"C{labels.index(label) % 10}", **look)
        if ticks:
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.set(xlabel=xlabel, title=group)
        panel.grid(alpha=0.3)
        handles, names = panel.get_legend_handles_labels()
        legend |= dict(zip(names, handles, strict=True))
    axes.flat[0].set_ylabel("test accuracy (%)")
    figure.legend(legend.values(), legend.keys(), loc="outside center right", fontsize="small")
    save(figure, path, title)
