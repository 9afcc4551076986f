"""What surrounds the content of a page: colours of both themes, styles, script, header and footer.

A page is one file that asks for nothing else. Its policy allows this style and this script, by
their digests, and nothing more; without the script all content is there.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import tacit
from tacit.report.charts import Markup, joined, tag

# Text and lines are readable on `paper` and `card`: tests compute the contrasts.
COLOURS = {
    "light": {
        "paper": "#f7f6f3",
        "card": "#ffffff",
        "ink": "#1b1c20",
        "soft": "#565a64",
        "rule": "#dcd9d2",
        "accent": "#1d4f91",
        "warn": "#8f2d0c",
        "warn-card": "#fdf1ea",
        "heat": "#2f6fc0",
        "s1": "#1d5fb4",
        "s2": "#b3410a",
        "s3": "#0b7158",
        "s4": "#87359a",
        "s5": "#7d5c00",
        "s6": "#4b5563",
    },
    "dark": {
        "paper": "#131518",
        "card": "#1b1e23",
        "ink": "#e9e8e4",
        "soft": "#a7abb5",
        "rule": "#353941",
        "accent": "#93bdf7",
        "warn": "#ffb395",
        "warn-card": "#33211a",
        "heat": "#6aa5f5",
        "s1": "#7db1fa",
        "s2": "#ff9e70",
        "s3": "#52cfab",
        "s4": "#dda3ec",
        "s5": "#e3bf5b",
        "s6": "#b6bfcc",
    },
}


def _variables(theme: str) -> str:
    return "".join(f"--{name}:{value};" for name, value in COLOURS[theme].items())


_LINES = "".join(
    f".line.s{n}{{stroke:var(--s{n})}}.dot.s{n}{{fill:var(--s{n})}}" for n in range(1, 7)
)

STYLE = (
    f":root{{color-scheme:light;{_variables('light')}}}"
    f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light])"
    f"{{color-scheme:dark;{_variables('dark')}}}}}"
    f":root[data-theme=dark]{{color-scheme:dark;{_variables('dark')}}}"
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;overflow-wrap:anywhere;background:var(--paper);color:var(--ink);
font:16px/1.55 -apple-system,"Segoe UI",Roboto,"Noto Sans","Liberation Sans",Arial,sans-serif}
h1,h2{font-family:Charter,"Iowan Old Style","Palatino Linotype",Georgia,"Liberation Serif",serif;
font-weight:600;line-height:1.2;letter-spacing:-.01em}
h1{font-size:2.15rem;margin:.1rem 0 .35rem}
h2{font-size:1.5rem;margin:0 0 .3rem}
h3{font-size:1rem;margin:0;line-height:1.35}
section>h3{margin-top:1.6rem}
h4{font-size:.95rem;margin:1.3rem 0 .4rem}
p{margin:.45rem 0;max-width:70ch}
a{color:var(--accent);text-underline-offset:.15em}
code{font:.9em ui-monospace,"SF Mono",Consolas,"Liberation Mono",monospace}
pre{font:.82rem/1.45 ui-monospace,"SF Mono",Consolas,"Liberation Mono",monospace;margin:0;
white-space:pre-wrap}
:focus-visible{outline:3px solid var(--accent);outline-offset:2px;border-radius:3px}
.skip{position:absolute;left:-999px}
.skip:focus{left:1rem;top:.6rem;background:var(--card);padding:.4rem .8rem;z-index:2}
.wide{max-width:1120px;margin:0 auto;padding:0 1.5rem}
.top{border-bottom:1px solid var(--rule);background:var(--card)}
.top .wide{display:flex;flex-wrap:wrap;align-items:center;gap:.35rem 1.4rem;
padding-top:.7rem;padding-bottom:.7rem}
.brand{font-weight:600;letter-spacing:.02em;margin-right:auto}
.brand span{color:var(--soft);font-weight:400}
.top nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;list-style:none;margin:0;padding:0;
font-size:.9rem}
.top nav a{color:var(--soft);text-decoration:none}
.top nav a:hover{color:var(--ink);text-decoration:underline}
button{font:inherit;font-size:.85rem;color:var(--ink);background:none;border:1px solid var(--soft);
border-radius:999px;padding:.15rem .8rem;cursor:pointer}
button:hover{border-color:var(--ink)}
main.wide{padding-top:2.4rem;padding-bottom:3rem}
main:focus{outline:none}
.lead{color:var(--soft);font-size:1.02rem}
.promise{font-size:1.08rem;margin-top:.9rem}
section{margin-top:3rem}
section>h2{border-top:1px solid var(--rule);padding-top:1.3rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:1px;
margin:1.5rem 0 0;background:var(--rule);border:1px solid var(--rule);border-radius:10px;
overflow:hidden}
.figures>div{background:var(--card);padding:.95rem 1.1rem 1rem;display:flex;
flex-direction:column;min-width:0}
.figures dt{order:2;font-size:.86rem;font-weight:600}
.figures dd{margin:0}
.figures .value{order:1;font-size:1.85rem;line-height:1.25;font-variant-numeric:tabular-nums;
letter-spacing:-.015em}
.figures .more{order:3;font-size:.82rem;line-height:1.4;color:var(--soft)}
.warning{border:1px solid var(--warn);border-left-width:5px;border-radius:8px;color:var(--ink);
background:var(--warn-card);padding:.65rem 1rem;margin:1.1rem 0}
.warning strong{color:var(--warn)}
.warning p{margin:.15rem 0}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:0 1.2rem;margin-top:1.3rem}
.charts>div{margin-bottom:1.2rem;min-width:0}
figure{margin:0 0 1.2rem;display:grid;grid-template-columns:minmax(0,1fr);grid-row:span 4;
grid-template-rows:subgrid;row-gap:0;background:var(--card);
border:1px solid var(--rule);border-radius:10px;padding:1rem 1.15rem .85rem;min-width:0;
break-inside:avoid;overflow-x:clip}
figcaption{margin-bottom:.7rem;grid-row:1}
figure>.legend{grid-row:3}
figure>details{grid-row:4}
figcaption p{font-size:.87rem;color:var(--soft);margin:.2rem 0 0}
svg.chart{grid-row:2;display:block;width:100%;height:auto;overflow:visible}
svg.chart text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg.chart .name{font-size:12.5px;fill:var(--ink)}
svg.chart .cell{fill:var(--ink)}
.grid{stroke:var(--rule);stroke-width:1;fill:none}
.axis{stroke:var(--soft);stroke-width:1.2;fill:none}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}
.reference{stroke:var(--soft);stroke-width:1.2}
.dot{stroke:var(--card);stroke-width:1.2}
.mark{fill:none;stroke:var(--ink);stroke-width:1.8}
.heat{fill:var(--heat);stroke:var(--rule);stroke-width:.6}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.15rem 1.2rem;margin:.5rem 0 0;padding:0;
font-size:.85rem}
.legend li{display:flex;align-items:center;gap:.5rem;min-width:0}
.swatch{width:30px;height:14px;flex:none;overflow:visible}
"""
    + _LINES
    + """
details{margin-top:.6rem;font-size:.87rem}
summary{cursor:pointer;color:var(--soft)}
summary:hover{color:var(--ink)}
.scroll{overflow-x:auto;margin:.6rem 0;max-width:100%;position:relative}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums;min-width:55%}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th,td{text-align:left;vertical-align:top;padding:.32rem 1.1rem .32rem 0;
border-bottom:1px solid var(--rule)}
thead th{color:var(--soft);font-weight:600;white-space:nowrap}
tbody th{font-weight:400;min-width:5rem}
td{min-width:4rem;max-width:26rem}
td:empty{min-width:0}
.facts{display:grid;grid-template-columns:minmax(9rem,15rem) minmax(0,1fr);margin:1.1rem 0 0}
.facts dt,.facts dd{margin:0;padding:.6rem 0;border-top:1px solid var(--rule)}
.facts dt{font-weight:600;padding-right:1rem}
.facts dd p{margin:0 0 .3rem}
.facts.tight dt,.facts.tight dd{padding:.28rem 0;font-size:.87rem}
.facts.tight dt{font-weight:400;color:var(--soft)}
ul.plain{padding-left:1.15rem;margin-top:.6rem;max-width:72ch}
ul.plain li{margin:.4rem 0}
.private{border:2px dashed var(--warn);border-radius:12px;padding:0 1.2rem 1.2rem}
.private>h2{border-top:0}
footer{border-top:1px solid var(--rule);color:var(--soft);font-size:.85rem;padding:1.2rem 0 2.5rem}
@media (min-width:1000px){
.charts.three{grid-template-columns:repeat(3,minmax(0,1fr))}
.three svg.chart text{font-size:15.5px}
.three svg.chart .name{font-size:16px}
}
@media (max-width:760px){
.wide{padding:0 1rem}
.top nav{width:100%;order:3}
.charts{grid-template-columns:minmax(0,1fr)}
h1{font-size:1.75rem}
main.wide{padding-top:1.5rem}
section{margin-top:2.2rem}
.figures{grid-template-columns:repeat(2,minmax(0,1fr))}
.figures>div{padding:.75rem .85rem .8rem}
.figures>div:first-child:nth-last-child(odd){grid-column:1/-1}
.figures .value{font-size:1.55rem}
figure{padding:.85rem .8rem .7rem}
svg.chart text{font-size:16.5px}
svg.chart .name{font-size:17px}
.facts{grid-template-columns:minmax(0,1fr)}
.facts dd{border-top:0;padding-top:0}
.facts dt{padding-bottom:.1rem}
.facts.tight dd{padding:0 0 .35rem}
}
@media print{
:root:root{color-scheme:light;"""
    + _variables("light")
    + """}
body{background:#fff;font-size:10.5pt}
.top nav,button,.skip,details:not([open]){display:none}
section{margin-top:1.6rem}
figure,.warning,.figures>div{break-inside:avoid}
a{color:inherit;text-decoration:none}
}
"""
)

# A button for the other theme. What was chosen is kept in this page alone.
SCRIPT = """
(function () {
  var root = document.documentElement, button = document.getElementById("theme");
  var system = window.matchMedia("(prefers-color-scheme: dark)");
  function dark() { return (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark"; }
  function name() { button.textContent = dark() ? "Light theme" : "Dark theme"; }
  button.addEventListener("click", function () {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  system.addEventListener("change", name);
  name();
  button.hidden = false;
})();
"""


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = (
    f"default-src 'none'; style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)}; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class PageSection:
    """A part of a page that the navigation leads to. `private` sets it apart by a border."""

    name: str
    heading: str
    content: Markup
    private: bool = False

    def element(self) -> Markup:
        label = f"{self.name}-heading"
        heading = tag("h2", self.heading, id=label)
        kind = "private" if self.private else None
        return tag(
            "section", heading, self.content, id=self.name, aria_labelledby=label, class_=kind
        )


def warning(heading: str, words: object) -> Markup:
    """A box that stands out."""
    return tag("div", tag("p", tag("strong", heading, ". "), words), class_="warning", role="note")


def chart_grid(figures: Sequence[Markup], *, three: bool = True) -> Markup:
    """Charts side by side, two to a row; three alone share one where there is room."""
    drawn = [figure for figure in figures if figure]
    share = three and len(drawn) == 3
    return tag("div", joined(drawn), class_="charts three" if share else "charts")


def document(title: str, kind: str, header: Markup, sections: Sequence[PageSection]) -> str:
    """A whole page, as text."""
    links = [tag("li", tag("a", part.heading, href=f"#{part.name}")) for part in sections]
    top = tag(
        "header",
        tag(
            "div",
            tag("div", "tacit ", tag("span", kind), class_="brand"),
            tag("nav", tag("ul", joined(links)), aria_label="Sections"),
            tag("button", "Dark theme", type="button", id="theme", hidden=True),
            class_="wide",
        ),
        class_="top",
    )
    main = tag(
        "main",
        header,
        joined(part.element() for part in sections),
        id="content",
        class_="wide",
        tabindex="-1",
    )
    footer = tag(
        "footer",
        tag(
            "div",
            f"Written by tacit {tacit.__version__}. This file is complete in itself: it loads "
            "nothing and sends nothing.",
            class_="wide",
        ),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    skip = tag("a", "Skip to the content", href="#content", class_="skip")
    body = tag("body", skip, top, main, footer, tag("script", Markup(SCRIPT)))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"
