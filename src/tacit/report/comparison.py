"""The page of several runs: figures side by side, curves in one frame, settings that differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tacit.report.charts import Markup, joined, plain, table, tag
from tacit.report.page import (
    HELD_OUT,
    about,
    certified_chart,
    figures_of,
    flat,
    history_charts,
    shown,
    warnings_of,
    write_text,
)
from tacit.report.page_privacy import curve_of, trade_off_chart
from tacit.report.page_shell import PageSection, chart_grid, document, warning
from tacit.report.saved_facts import SavedFacts, read_facts

MOST_RUNS = 12  # more lines than these cannot be told apart


def compare(
    folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] = "compare.html"
) -> Path:
    """Write one page that compares the runs in these folders; return its path.

    It shows metrics, ε and settings side by side, and the curves of all runs in one frame. Raises
    ValueError for a folder without a run, or one whose run.json is damaged.

        tacit.report.compare(["runs/a", "runs/b"], "compare.html")
    """
    if not 2 <= len(folders) <= MOST_RUNS:
        raise ValueError(f"a comparison takes 2 to {MOST_RUNS} runs, and {len(folders)} are given")
    runs = [read_facts(Path(folder)) for folder in folders]
    return write_text(comparison_of(_named(runs)), Path(out))


def _named(runs: Sequence[SavedFacts]) -> list[tuple[str, SavedFacts]]:
    """Runs by the names of their folders, numbered where two share one."""
    names = [run.name for run in runs]
    return [
        (f"{run.name} ({number})" if names.count(run.name) > 1 else run.name, run)
        for number, run in enumerate(runs, 1)
    ]


def comparison_of(runs: Sequence[tuple[str, SavedFacts]]) -> str:
    """The page as text."""
    header = joined(
        [
            tag("h1", f"{len(runs)} runs"),
            tag("p", ", ".join(name for name, _ in runs), class_="lead"),
            *_cautions(runs),
        ]
    )
    figures = list(history_charts(runs, named=True))
    certificates = [(name, run.certificate) for name, run in runs if run.certificate is not None]
    if certificates:
        figures.append(certified_chart(certificates, named=True))
    curves = [(name, curve) for name, run in runs if (curve := curve_of(run)) is not None]
    privacy = [tag("p", _TOGETHER)]
    if curves:
        privacy.append(chart_grid([trade_off_chart(curves)]))
    sections = [
        PageSection("figures", "Figures", _figures(runs)),
        PageSection("results", "Results", joined([tag("p", HELD_OUT), _charts(figures)])),
        PageSection("privacy", "Privacy", joined(privacy)),
        PageSection("settings", "Settings that differ", _differences(runs)),
        PageSection("notes", "Notes of the runs", _notes(runs)),
    ]
    return document(f"{len(runs)} private runs compared", "comparison", header, sections)


_TOGETHER = (
    "Each ε is of one run alone. Runs on the same records add up: a ledger that all of them are "
    "charged to (--ledger) states what they cost together. To keep the best of several runs is a "
    "choice that looked at all of them."
)


def _charts(figures: Sequence[Markup]) -> Markup:
    if not figures:
        return tag("p", "No run was evaluated on its way.")
    return chart_grid(figures, three=False)


def _cautions(runs: Sequence[tuple[str, SavedFacts]]) -> list[Markup]:
    """Warnings of each run, and what makes their ε incomparable."""
    found = []
    relations = {str(run.relation) for _, run in runs}
    if len(relations) > 1:
        words = f"The neighbouring relations are {' and '.join(sorted(relations))}: an ε under one "
        words += "is no ε under the other."
        found.append(warning("ε are not comparable", words))
    deltas = sorted({run.delta for _, run in runs})
    if len(deltas) > 1:
        words = f"δ is {', '.join(map(plain, deltas))}. Compare the trade-off curves, which need "
        words += "no δ."
        found.append(warning("ε are at different δ", words))
    data = {str(run.used("dataset")) for _, run in runs}
    if len(data) > 1:
        words = f"The runs are of {', '.join(sorted(data))}."
        found.append(warning("Different data", words))
    for name, run in runs:
        boxes = warnings_of(run)
        if boxes:
            found.append(tag("div", tag("h4", name), joined(boxes)))
    return found


def _figures(runs: Sequence[tuple[str, SavedFacts]]) -> Markup:
    """A row for each run, a column for each figure that some run has."""
    values = [{name: value for name, value, _ in figures_of(run)} for _, run in runs]
    columns = list(dict.fromkeys(name for row in values for name in row))
    header = ("run", *columns, "δ", "relation", "what it is")
    rows = [
        (name, *(row.get(column, "") for column in columns), plain(run.delta), run.relation,
         about(run))
        for (name, run), row in zip(runs, values, strict=True)
    ]  # fmt: skip
    return table(header, rows, "Figures of each run")


def _differences(runs: Sequence[tuple[str, SavedFacts]]) -> Markup:
    """Settings that are not the same in all runs, a column for each run."""
    settings = [
        {name: value for name, value in flat("", run.config) if not name.startswith(_OUTPUT)}
        for _, run in runs
    ]
    names = list(dict.fromkeys(name for row in settings for name in row))
    rows = [
        (name, *(shown(row[name]) if name in row else "not set" for row in settings))
        for name in names
        if len({repr(row.get(name)) for row in settings}) > 1
    ]
    if not rows:
        return tag("p", "All settings are the same, as far as run.json names them.")
    return table(("setting", *(name for name, _ in runs)), rows, "Settings that differ")


_OUTPUT = ("settings.output.", "used.model_changes")


def _notes(runs: Sequence[tuple[str, SavedFacts]]) -> Markup:
    parts: list[Markup] = []
    for name, run in runs:
        listed = tag("ul", joined(tag("li", note) for note in run.notes), class_="plain")
        parts += [tag("h3", name), listed if run.notes else tag("p", "None.")]
    return joined(parts)
