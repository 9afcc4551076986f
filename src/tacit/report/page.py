"""The page of one run: what it reached, what it promises, what that leaves out, how it was made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tacit.accounting.f_dp import TradeOff
from tacit.accounting.gaussian_dp import no_privacy_note
from tacit.certificates.accuracy import PIXEL
from tacit.data.download import whole_file
from tacit.report.charts import (
    ChartAxis,
    ChartData,
    Markup,
    Series,
    heat_map,
    joined,
    line_chart,
    percent,
    plain,
    table,
    tag,
)
from tacit.report.page_privacy import (
    calibration_charts,
    curve_of,
    disagreement,
    not_covered,
    statement,
    trade_off_chart,
    words_of,
)
from tacit.report.page_shell import PageSection, chart_grid, document, warning
from tacit.report.saved_facts import SavedFacts, read_facts
from tacit.report.statement_words import in_one_sentence
from tacit.training.evaluation import metric_rows

PAGE = "report.html"
HELD_OUT = "Held out; not covered by ε."
NOT_PRIVATE = "Not private: for the developer's eyes"
# A matrix of more classes cannot be read as a picture.
_MOST_CLASSES = 40


def write_page(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of the run in `folder`, by default as report.html in it; return its path.

    One file of HTML that loads nothing. Needs run.json alone, and shows what `save_diagnostics`
    wrote beside it. Raises ValueError if run.json is missing or damaged.

        tacit.report.write_page("runs/x")
    """
    run = read_facts(Path(folder))
    target = Path(folder) / PAGE if out is None else Path(out)
    return write_text(page_of(run), target)


def write_text(text: str, target: Path) -> Path:
    """Write a page whole or not at all."""
    if target.is_dir():
        raise ValueError(f"{target} is a folder; give a file such as {target}/{PAGE}")
    if target.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{target} is not the name of a page; give a file that ends in .html")
    try:
        with whole_file(target) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{target} cannot be written ({error.strerror}); give another file"
        ) from error
    return target


def page_of(run: SavedFacts) -> str:
    """The page as text."""
    curve = curve_of(run)
    words = words_of(run, curve)
    sections = [
        PageSection("results", "Results", _results(run)),
        PageSection("privacy", "Privacy", _privacy(run, curve, words)),
        PageSection("not-covered", "What ε does not cover", not_covered(run)),
    ]
    if run.diagnostics:
        sections.append(PageSection("not-private", NOT_PRIVATE, _diagnostics(run), private=True))
    sections.append(PageSection("settings", "Settings", _settings(run)))
    header = _header(run, words)
    return document(f"{run.name}: report of a private run", "run report", header, sections)


# ---- the top -------------------------------------------------------------------------------------


def _header(run: SavedFacts, words: Mapping[str, Any]) -> Markup:
    parts = [tag("h1", run.name), tag("p", about(run), class_="lead")]
    if (promise := in_one_sentence(words)) is not None:
        parts.append(tag("p", promise, class_="promise"))
    parts.append(_figures(run))
    parts += warnings_of(run)
    if any(found.get("private") for found in run.diagnostics):
        told = "The part with a dashed border reads training records. Delete diagnostics.json "
        told += "and write the page again before you give it to anybody."
        parts.append(warning("This page holds figures that are not private", told))
    return joined(parts)


def about(run: SavedFacts) -> str:
    """Data, model, method and size of a run, as far as run.json names them."""
    settings = run.config.get("settings")
    groups = settings.values() if isinstance(settings, dict) else ()
    given = {k: v for group in groups if isinstance(group, dict) for k, v in group.items()}
    parameters = run.used("parameters")
    size = f"{parameters:,} parameters" if isinstance(parameters, int) else None
    model = None if given.get("model") == "default" else given.get("model")
    known = [run.used("dataset"), run.task, model, given.get("query"), size]
    return " · ".join(str(part) for part in known if part) or "a run from Python"


def warnings_of(run: SavedFacts) -> list[Markup]:
    """What a reader must see before any figure."""
    found = [disagreement(run)]
    if (note := no_privacy_note(run.epsilon, run.delta)) is not None:
        found.append(warning("This is no privacy", note))
    if run.seeded:
        words = "Whoever knows the seed can remove the noise. Do not use this run for a release."
        found.append(warning("A seeded run", words))
    if (behind := _behind(run)) is not None:
        found.append(warning("No better than the baseline", behind))
    return [box for box in found if box is not None]


# The task's own metric, and whether more of it is better.
_DECISIVE = (("balanced_accuracy", True), ("accuracy", True), ("root_mean_squared_error", False))


def _behind(run: SavedFacts) -> str | None:
    """A sentence where the model is no better than one that ignores its inputs."""
    for name, more_is_better in _DECISIVE:
        own, base = run.metrics.get(name), run.baseline.get(name)
        if own is None or base is None:
            continue
        if own > base if more_is_better else own < base:
            return None
        (words, value), (_, other) = _in_words({name: own})[0], _in_words({name: base})[0]
        return f"The model's {words} is {value}. An answer that ignores the inputs has {other}."
    return None


def figures_of(run: SavedFacts) -> list[tuple[str, str, str]]:
    """(name, value, more) of what a reader looks for first."""
    rows = []
    for name, value in _in_words(run.metrics)[:1]:
        base = dict(_in_words(run.baseline)).get(name)
        more = f"held out; baseline {base}" if base else "held out, not covered by ε"
        rows.append((name, value, more))
    rows.append(("epsilon (PLD)", plain(run.epsilon), f"δ = {plain(run.delta)}, {run.relation}"))
    rows.append(("noise multiplier", plain(run.noise_multiplier), run.sampling))
    ended = "plan complete" if run.stopped == "plan complete" else f"ended: {run.stopped}"
    if run.planned_steps is not None and run.steps != run.planned_steps:
        ended = f"of {run.planned_steps:,} planned; {ended}"
    rows.append(("steps", f"{run.steps:,}", ended))
    if run.certificate is not None and (shares := _shares(run.certificate)):
        radius, share = shares[-1]
        rows.append(("certified accuracy", percent(share), f"at L2 radius {radius}, held out"))
    return rows


def _in_words(metrics: dict[str, float]) -> list[tuple[str, str]]:
    return metric_rows(dict[str, float | None](metrics))


def _figures(run: SavedFacts) -> Markup:
    parts = [
        tag(
            "div", tag("dt", name), tag("dd", value, class_="value"), tag("dd", more, class_="more")
        )
        for name, value, more in figures_of(run)
    ]
    return tag("dl", joined(parts), class_="figures")


def _shares(certificate: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(radius in words, share), as the certificate has them."""
    unit = float(certificate["unit"])
    return [
        (f"{row['radius']:g}/255" if unit == PIXEL else plain(row["radius"] * unit), row["share"])
        for row in certificate["certified_accuracy"]
    ]


# ---- results -------------------------------------------------------------------------------------

_HISTORY = (
    ("accuracy", "Accuracy", percent),
    ("root_mean_squared_error", "Root mean squared error", plain),
    ("loss", "Loss", plain),
)


def _results(run: SavedFacts) -> Markup:
    parts: list[object] = [
        tag("p", "Measured on held-out records, without noise: ε does not cover these figures.")
    ]
    if run.metrics:
        header = ("metric", "this model", *([run.predictor] if run.baseline else []))
        base = dict(_in_words(run.baseline))
        rows = [
            (name, value, *([base.get(name, "")] if run.baseline else []))
            for name, value in _in_words(run.metrics)
        ]
        parts.append(table(header, rows, "Metrics of held-out records"))
    else:
        parts.append(tag("p", "The run was saved without metrics of held-out records."))
    figures = list(history_charts([(run.name, run)]))
    if run.certificate is not None:
        figures.append(certified_chart([(run.name, run.certificate)]))
    if run.confusion is not None:
        figures.append(_confusion(run.confusion, run.class_names))
    if not run.history:
        parts.append(tag("p", "The run was not evaluated on its way, so there is no curve of it."))
    return joined([*parts, chart_grid(figures)])


def history_charts(
    runs: Sequence[tuple[str, SavedFacts]], *, named: bool = False
) -> Iterable[Markup]:
    """Each metric that was measured on the way, against the ε spent by then."""
    for key, title, form in _HISTORY:
        lines = []
        for style, (name, run) in enumerate(runs):
            points = [p for p in run.history if key in p]
            if points:
                x, y = [p["epsilon"] for p in points], [p[key] for p in points]
                lines.append(Series(name, x, y, style))
        if lines:
            deltas = {run.delta for _, run in runs}
            at = f" at δ = {plain(deltas.pop())}" if len(deltas) == 1 else ""
            yield line_chart(
                f"history-{key.replace('_', '-')}",
                f"{title} against ε",
                lines,
                ChartAxis(f"ε spent{at}", plain, (0.0,)),
                ChartAxis(f"held-out {title.lower()}", form),
                note=HELD_OUT,
                named=named,
            )


def certified_chart(
    certificates: Sequence[tuple[str, Mapping[str, Any]]], *, named: bool = False
) -> Markup:
    """The share of records that are right within each radius."""
    lines, rows = [], []
    pixels = {float(certificate["unit"]) == PIXEL for _, certificate in certificates}
    unit = "1/255" if pixels == {True} else "in units of the inputs"
    for style, (name, certificate) in enumerate(certificates):
        scale = 1.0 if pixels == {True} else float(certificate["unit"])
        points = certificate["certified_accuracy"]
        radii, shares = [p["radius"] * scale for p in points], [p["share"] for p in points]
        lines.append(Series(name, radii, shares, style))
        rows += [(name, plain(r), percent(s)) for r, s in zip(radii, shares, strict=True)]
    data = ChartData(("run", f"L2 radius ({unit})", "right and certified"), rows)
    inputs = {str(certificate.get("inputs", "inputs of the network")) for _, certificate in
              certificates}  # fmt: skip
    return line_chart(
        "certified",
        "Certified accuracy by radius",
        lines,
        ChartAxis(f"L2 radius ({unit})", plain, (0.0,)),
        ChartAxis("right and certified", percent, (0.0,)),
        note=f"Right, whatever change of this norm is made to {' or '.join(inputs)}. {HELD_OUT}",
        data=data,
        named=named,
    )


def _confusion(counts: Sequence[Sequence[float]], names: Sequence[str] | None) -> Markup:
    labels = list(names) if names else [str(k) for k in range(len(counts))]
    if len(labels) <= _MOST_CLASSES:
        return heat_map("confusion", "Confusion matrix", counts, labels, note=HELD_OUT)
    pairs = [
        (counts[i][j], labels[i], labels[j])
        for i in range(len(labels))
        for j in range(len(labels))
        if i != j and counts[i][j]
    ]
    pairs.sort(reverse=True)
    rows = [(true, taken, f"{count:g}") for count, true, taken in pairs[:20]]
    caption = "The most frequent confusions"
    return tag(
        "div",
        tag("h3", f"Confusions: the {len(rows)} most frequent of {len(labels)} classes"),
        table(("true class", "taken for", "records"), rows, caption),
    )


# ---- privacy, diagnostics ------------------------------------------------------------------------


def _privacy(run: SavedFacts, curve: TradeOff | None, words: Mapping[str, Any]) -> Markup:
    charts = [trade_off_chart([(run.name, curve)])] if curve is not None else []
    charts += calibration_charts(run)
    return joined([statement(words), chart_grid(charts)])


def _diagnostics(run: SavedFacts) -> Markup:
    charts = []
    for number, found in enumerate(run.diagnostics):
        points = found["points"]
        steps = [point["step"] for point in points]
        lines = [
            Series(name, steps, [float(point[name]) for point in points], style)
            for style, name in enumerate(("median", "least", "largest"))
        ]
        note = f"{found['name']}, {found['notice']}."
        charts.append(
            line_chart(f"diagnostic-{number}", str(found["quantity"]).capitalize(), lines,
                       ChartAxis("steps", plain, (0.0,)), ChartAxis(found["quantity"]), note=note)
        )  # fmt: skip
        if any(point.get("clipped") is not None for point in points):
            shares = [float(point["clipped"]) for point in points]
            charts.append(
                line_chart(f"clipped-{number}", "Clipping rate",
                           [Series("clipped", steps, shares, 3)],
                           ChartAxis("steps", plain, (0.0,)),
                           ChartAxis("records that are clipped", percent, (0.0, 1.0)),
                           note=f"The share of gradients above {plain(found['max_norm'])}. {note}")
            )  # fmt: skip
    words = tag(
        "p",
        "These figures were measured during the run to understand it. Where they read training "
        "records, to show them is a release that no ε covers.",
    )
    return joined([words, chart_grid(charts)])


# ---- settings ------------------------------------------------------------------------------------


def _settings(run: SavedFacts) -> Markup:
    parts: list[Markup] = []
    settings = run.config.get("settings")
    if settings:
        parts.append(_group("Given", settings))
    rest = {name: value for name, value in run.config.items() if name != "settings"}
    used = rest.pop("used", None)
    if used:
        parts.append(_group("Used", used))
    if rest:
        parts.append(_group("Configuration", rest))
    cost: dict[str, object] = {"seconds": run.seconds}
    if run.peak_memory_bytes is not None:
        cost["peak memory"] = f"{run.peak_memory_bytes / 2**20:,.0f} MiB"
    parts.append(_group("Environment", {**cost, **run.environment}))
    return joined(parts)


def _group(heading: str, values: object) -> Markup:
    rows = list(flat("", values))
    items = joined(
        part for name, value in rows for part in (tag("dt", name), tag("dd", shown(value)))
    )
    return joined([tag("h3", heading.capitalize()), tag("dl", items, class_="facts tight")])


def flat(name: str, value: object) -> Iterable[tuple[str, object]]:
    """Nested settings as rows, with dots in their names; what is not set is left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(f"{name}.{key}" if name else str(key), inner)
    elif value is not None and value != []:
        yield name or "value", value


def shown(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    text = repr(value) if isinstance(value, float) else str(value)
    return tag("pre", text) if "\n" in text else text
