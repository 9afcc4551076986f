"""Elements of a page, escaped by construction, and charts drawn as SVG by hand.

`tag` makes an element: what is not markup already is escaped, so that no text of a run can become
an element. A chart is a figure: title, SVG, legend, and a table of its data.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_VOID = {"meta", "br", "col"}


class Markup(str):
    """Text that is HTML. Any operation on it gives plain text, which is escaped again."""


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element. `class_` is class and `aria_label` aria-label; None leaves an attribute out."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        text = html.escape(str(value))
        parts.append(f" {key}" if value is True else f' {key}="{text}"')
    parts.append(">")
    if name not in _VOID:
        parts += [*map(_escaped, children), f"</{name}>"]
    return Markup("".join(parts))


def joined(children: Iterable[object]) -> Markup:
    """Several elements or texts, one after the other."""
    return Markup("".join(map(_escaped, children)))


def _escaped(child: object) -> str:
    if child is None:
        return ""
    return str(child) if isinstance(child, Markup) else html.escape(str(child))


def table(header: Sequence[object], rows: Iterable[Sequence[object]], caption: str) -> Markup:
    """A table in a box that scrolls by itself. Cells that hold numbers are set to the right."""
    head = tag("tr", *(tag("th", name, scope="col") for name in header))
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
        for row in rows
    ]
    whole = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", joined(body)))
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


# ---- numbers on axes -----------------------------------------------------------------------------


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten, from below `low` to above `high`.

    Each is the double nearest to its decimal.
    """
    if not high > low:
        margin = abs(low) / 2 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = math.floor(math.log10(rough))
    factor = next(f for f in (1, 2, 5, 10) if f * 10.0**power >= rough * (1 - 1e-9))
    power, factor = (power + 1, 1) if factor == 10 else (power, factor)
    step = factor * 10.0**power
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * factor}e{power}") for index in range(first, last + 1)]


def plain(value: float) -> str:
    """Four digits at most; no exponent between 1e-4 and 1e6."""
    if not math.isfinite(value):
        return "∞" if value > 0 else ("−∞" if value < 0 else "not a number")
    text = f"{value:,.0f}" if abs(value) >= 1000 and abs(value) < 1e6 else f"{value:.4g}"
    return text.replace("-", "−")


def percent(value: float) -> str:
    return f"{100 * value:.4g}%" if math.isfinite(value) else plain(value)


@dataclass(frozen=True)
class ChartAxis:
    """Label, how a value is written, and values that the axis must reach."""

    label: str
    form: Callable[[float], str] = plain
    reach: tuple[float, ...] = ()
    fixed: bool = False  # the axis ends where `reach` does

    def ticks(self, values: Iterable[float]) -> list[float]:
        seen = [*self.reach] if self.fixed else [*self.reach, *values]
        return nice_ticks(min(seen), max(seen))


# ---- line charts ---------------------------------------------------------------------------------

WIDTH, HEIGHT = 480, 310
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 34, 54
_DASHES = (None, "8 4", "2 3", "10 3 2 3", "5 2", "1 4")
_MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",  # circle
    "M-3.6 -3.6h7.2v7.2h-7.2z",  # square
    "M0 -5L4.6 3.4H-4.6z",  # triangle
    "M0 -5.2L4.4 0L0 5.2L-4.4 0z",  # diamond
    "M-4.6 -3.4H4.6L0 5z",  # triangle upside down
)
STYLES = 6  # colours of series, --s1 to --s6; dashes and markers change with them


@dataclass(frozen=True)
class Series:
    """A line by name. `style` chooses colour, dash and marker; None is a thin grey reference."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: int | None = 0
    markers: bool = True

    def points(self) -> list[tuple[float, float]]:
        """Those that have a place on an axis."""
        pairs = zip(self.x, self.y, strict=True)
        return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


@dataclass(frozen=True)
class Mark:
    """A point that is pointed out."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class ChartData:
    """The data of a chart, where it is not simply every point."""

    header: tuple[str, ...]
    rows: Sequence[Sequence[object]]


def line_chart(
    name: str,
    title: str,
    series: Sequence[Series],
    x: ChartAxis,
    y: ChartAxis,
    *,
    marks: Sequence[Mark] = (),
    note: object = None,
    data: ChartData | None = None,
    named: bool = False,
) -> Markup:
    """A figure with id `name`. Points without a place on the axes are in the table alone.

    A single line has no legend, unless `named`.
    """
    points = [point for line in series for point in line.points()]
    shown = [m for m in marks if math.isfinite(m.x) and math.isfinite(m.y)]
    points += [(mark.x, mark.y) for mark in shown]
    if not points:
        return Markup("")
    x_ticks, y_ticks = x.ticks(p[0] for p in points), y.ticks(p[1] for p in points)

    def place(at: tuple[float, float]) -> tuple[float, float]:
        across = (at[0] - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (at[1] - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return (
            round(_LEFT + across * (WIDTH - _LEFT - _RIGHT), 2),
            round(HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM), 2),
        )

    drawn = [_frame(x, y, x_ticks, y_ticks, place)]
    drawn += [_line(line, place, x, y) for line in series]
    for mark in shown:
        across, down = place((mark.x, mark.y))
        words = f"{mark.name}: {x.label} {x.form(mark.x)}, {y.label} {y.form(mark.y)}"
        drawn.append(tag("circle", tag("title", words), cx=across, cy=down, r=7, class_="mark"))
    entries = [(line.name, line.style, line.markers) for line in series]
    legend = _legend(entries, shown) if named or len(entries) + len(shown) > 1 else Markup("")
    data = data or _table_of(series, x, y)
    described = f"{title}. {y.label} against {x.label}: " + "; ".join(
        _described(line, x, y) for line in series if line.style is not None
    )
    return _figure(name, title, (WIDTH, HEIGHT), drawn, described, legend, note, data)


def _described(line: Series, x: ChartAxis, y: ChartAxis) -> str:
    points = line.points()
    if not points:
        return f"{line.name} has no values"
    (x0, y0), (x1, y1) = points[0], points[-1]
    return f"{line.name} from {y.form(y0)} at {x.form(x0)} to {y.form(y1)} at {x.form(x1)}"


def _frame(
    x: ChartAxis,
    y: ChartAxis,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    place: Callable[[tuple[float, float]], tuple[float, float]],
) -> Markup:
    left, bottom = place((x_ticks[0], y_ticks[0]))
    right, _ = place((x_ticks[-1], y_ticks[-1]))
    parts = []
    for value in y_ticks:
        _, down = place((x_ticks[0], value))
        kind = "axis" if value == y_ticks[0] else "grid"
        parts.append(tag("path", d=f"M{left} {down}H{right}", class_=kind))
        parts.append(tag("text", y.form(value), x=left - 8, y=down, dy="0.35em", text_anchor="end"))
    for value in x_ticks:
        across, _ = place((value, y_ticks[0]))
        parts.append(tag("path", d=f"M{across} {bottom}v5", class_="axis"))
        parts.append(
            tag("text", x.form(value), x=across, y=bottom + 9, dy="0.8em", text_anchor="middle")
        )
    middle = (left + right) / 2
    parts.append(tag("text", x.label, x=middle, y=HEIGHT - 6, text_anchor="middle", class_="name"))
    parts.append(tag("text", y.label, x=2, y=15, class_="name"))
    return tag("g", joined(parts), class_="frame")


def _line(
    line: Series,
    place: Callable[[tuple[float, float]], tuple[float, float]],
    x: ChartAxis,
    y: ChartAxis,
) -> Markup:
    points = line.points()
    if not points:
        return Markup("")
    places = [place(point) for point in points]
    path = "M" + "L".join(f"{across} {down}" for across, down in places)
    parts = [tag("path", d=path, class_=f"line {_class(line.style)}", **_dash(line.style))]
    if line.markers and line.style is not None:
        for (at_x, at_y), (across, down) in zip(points, places, strict=True):
            words = f"{line.name}: {x.label} {x.form(at_x)}, {y.label} {y.form(at_y)}"
            parts.append(
                tag(
                    "path",
                    tag("title", words),
                    d=without_colour(line.style)[0],
                    transform=f"translate({across} {down})",
                    class_=f"dot {_class(line.style)}",
                )
            )
    return tag("g", joined(parts))


def without_colour(style: int) -> tuple[str, str | None]:
    """The marker and the dash of a style: what tells lines apart where colours do not."""
    return _MARKERS[style % len(_MARKERS)], _DASHES[style % len(_DASHES)]


def _class(style: int | None) -> str:
    return "reference" if style is None else f"s{style % STYLES + 1}"


def _dash(style: int | None) -> dict[str, object]:
    dash = "4 4" if style is None else without_colour(style)[1]
    return {"stroke_dasharray": dash}


def _legend(entries: Sequence[tuple[str, int | None, bool]], marks: Sequence[Mark]) -> Markup:
    items = []
    for name, style, markers in entries:
        parts = [tag("path", d="M0 7H30", class_=f"line {_class(style)}", **_dash(style))]
        if markers and style is not None:
            shape, at = without_colour(style)[0], "translate(15 7)"
            parts.append(tag("path", d=shape, transform=at, class_=f"dot {_class(style)}"))
        items.append((name, parts))
    items += [
        (name, [tag("circle", cx=15, cy=7, r=5.5, class_="mark")])
        for name in dict.fromkeys(mark.name for mark in marks)
    ]
    swatches = [
        tag(
            "li",
            tag("svg", joined(parts), viewBox="0 0 30 14", class_="swatch", aria_hidden="true"),
            tag("span", name),
        )
        for name, parts in items
    ]
    return tag("ul", joined(swatches), class_="legend")


def _table_of(series: Sequence[Series], x: ChartAxis, y: ChartAxis) -> ChartData:
    lines = [line for line in series if line.style is not None]
    if all(list(line.x) == list(lines[0].x) for line in lines):
        names = [y.label] if len(lines) == 1 else [line.name for line in lines]
        columns = [[y.form(value) for value in line.y] for line in lines]
        rows = list(zip(map(x.form, lines[0].x), *columns, strict=True))
        return ChartData((x.label, *names), rows)
    return ChartData(
        ("line", x.label, y.label),
        [
            (line.name, x.form(at), y.form(value))
            for line in lines
            for at, value in zip(line.x, line.y, strict=True)
        ],
    )


def _figure(
    name: str,
    title: str,
    size: tuple[float, float],
    drawn: Iterable[Markup],
    described: str,
    legend: Markup,
    note: object,
    data: ChartData,
) -> Markup:
    picture = tag(
        "svg",
        joined(drawn),
        viewBox=f"0 0 {size[0]:g} {size[1]:g}",
        role="img",
        aria_label=described,
        class_="chart",
    )
    numbers = tag(
        "details",
        tag("summary", "Data: ", title),
        table(data.header, data.rows, f"Data of the chart: {title}"),
    )
    heading = tag("figcaption", tag("h3", title), tag("p", note) if note else None)
    return tag("figure", heading, picture, legend, numbers, id=name)


# ---- heat maps -----------------------------------------------------------------------------------

HEAT_MOST = 0.45  # opacity of a full cell: the text on it must stay readable in both themes


def heat_map(
    name: str,
    title: str,
    counts: Sequence[Sequence[float]],
    labels: Sequence[str],
    *,
    note: object = None,
) -> Markup:
    """A square matrix; each row is coloured by its shares, and numbers are written out."""
    left, top = 84, 36
    wide = (WIDTH - left - 8) / len(labels)
    high = 0.6 * wide  # about as high as a line chart, beside which it stands
    short = [label if len(label) <= 10 else label[:9] + "…" for label in labels]
    turned = max(map(len, short)) > 3 and len(labels) > 4
    bottom = top + high * len(labels)
    height = bottom + (92 if turned else 52)
    every = math.ceil(len(labels) / 14)  # labels of more classes than these would overlap
    parts = [
        tag("text", "true class", x=2, y=15, class_="name"),
        tag("text", "taken for", x=_at((left + WIDTH - 8) / 2), y=_at(height - 6),
            text_anchor="middle", class_="name"),
    ]  # fmt: skip
    for i, row in enumerate(counts):
        total = sum(row) or 1.0
        down, across = top + i * high, left + (i + 0.5) * wide
        if i % every == 0:
            parts.append(tag("text", short[i], x=left - 8, y=_at(down + high / 2), dy="0.35em",
                             text_anchor="end"))  # fmt: skip
            at = f"translate({_at(across)} {_at(bottom + 16)})" + (" rotate(-40)" if turned else "")
            anchor = "end" if turned else "middle"
            parts.append(tag("text", short[i], transform=at, text_anchor=anchor))
        for j, count in enumerate(row):
            words = f"{labels[i]} taken for {labels[j]}: {count:g} ({count / total:.1%})"
            parts.append(
                tag("rect", tag("title", words), x=_at(left + j * wide), y=_at(down),
                    width=_at(0.96 * wide), height=_at(0.95 * high), class_="heat",
                    fill_opacity=round(HEAT_MOST * count / total, 4))
            )  # fmt: skip
            if count and len(labels) <= 12:
                parts.append(
                    tag("text", f"{count:g}", x=_at(left + (j + 0.48) * wide),
                        y=_at(down + 0.475 * high), dy="0.35em", text_anchor="middle",
                        class_="cell")
                )  # fmt: skip
    rows = [(labels[i], *(f"{count:g}" for count in row)) for i, row in enumerate(counts)]
    right = sum(counts[i][i] for i in range(len(labels)))
    every_record = sum(map(sum, counts))
    described = f"{title}: rows are true classes, columns what they were taken for. "
    described += f"{right:g} of {every_record:g} records are on the diagonal."
    data = ChartData(("true class", *labels), rows)
    size = (WIDTH, _at(height))
    return _figure(name, title, size, parts, described, Markup(""), note, data)


def _at(value: float) -> float:
    return round(value, 2)
