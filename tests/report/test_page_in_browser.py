"""The page as a browser shows it: width, themes, without scripts. Needs Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tacit
from tests.report.conftest import CONFUSION, MakeRun

BROWSER = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        if (found := shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium was found")

# Around the page, so that the page itself stays as it is, with its policy.
AROUND = """<!doctype html><html><body style="margin:0">
<iframe id="frame" sandbox="{sandbox}" style="border:0;width:{width}px;height:30000px"
srcdoc="{page}"></iframe><script>
addEventListener("load", function () {{
  var page = document.getElementById("frame").contentDocument, root = page.documentElement;
  var view = document.getElementById("frame").contentWindow;
  var colour = function () {{ return view.getComputedStyle(page.body).backgroundColor; }};
  page.querySelectorAll("details").forEach(function (one) {{ one.open = {open}; }});
  var button = page.getElementById("theme"), seen = [colour()], names = [button.textContent];
  var wide = [];
  page.querySelectorAll("body *").forEach(function (one) {{
    var box = one.getBoundingClientRect();
    var inside = one.parentNode.closest(".scroll") || one.closest(".skip");
    if (box.right > root.clientWidth + 0.5 && !inside)
      wide.push(one.tagName + "." + one.getAttribute("class"));
  }});
  var measures = {{width: root.scrollWidth, view: root.clientWidth, height: root.scrollHeight,
    wide: wide, hidden: button.hidden, words: page.body.innerText.length,
    size: Math.min.apply(null, Array.from(page.querySelectorAll("svg.chart text")).map(
      function (one) {{ return one.getBoundingClientRect().height; }}))}};
  for (var i = 0; i < 2; i++) {{
    button.click(); seen.push(colour()); names.push(button.textContent);
  }}
  measures.colours = seen; measures.names = names;
  var told = document.createElement("pre");
  told.id = "told"; told.textContent = JSON.stringify(measures);
  document.body.appendChild(told);
}});
</script></body></html>"""


def run_browser(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
    ]
    return subprocess.run(
        [*command, "--enable-logging=stderr", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def measured(
    page: Path, width: int, *, dark: bool = False, scripts: bool = True, opened: bool = False
) -> dict[str, Any]:
    around = AROUND.format(
        page=html.escape(page.read_text(encoding="utf-8")),
        width=width,
        sandbox="allow-same-origin allow-scripts" if scripts else "allow-same-origin",
        open="true" if opened else "false",
    )
    file = page.with_name(f"around-{width}-{dark}-{scripts}-{opened}.html")
    file.write_text(around, encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    result = run_browser(scheme, "--window-size=1400,1000", "--dump-dom", file.as_uri())
    assert "Content Security Policy" not in result.stderr
    (told,) = re.findall(r'<pre id="told">(.*?)</pre>', result.stdout, re.DOTALL)
    return json.loads(html.unescape(told))


@pytest.fixture
def longest(make_run: MakeRun) -> Path:
    """A page with everything on it, and words that do not break by themselves."""
    folder = make_run(
        "a_name_" * 12,
        confusion=CONFUSION,
        class_names=["a class with a very long name indeed", "b" * 60, "c"],
        baseline={"accuracy": 0.3, "loss": 1.2},
        notes=["x" * 300],
        config={"used": {"a." + "k" * 90: "v" * 400, "model": "Linear(\n" + "w" * 200 + ")"}},
        seeded=True,
    )
    return tacit.report.write_page(folder)


def test_a_phone_needs_no_scrolling_to_the_side(longest: Path) -> None:
    for opened in (False, True):
        found = measured(longest, 375, opened=opened)
        assert found["view"] == 375
        assert found["width"] <= 375, found["wide"]
        assert found["wide"] == []
    assert found["size"] >= 10  # pixels: labels of charts stay readable


def test_a_comparison_fits_a_phone_too(make_run: MakeRun, tmp_path: Path) -> None:
    folders = [make_run("first" * 20), make_run("second", seeded=True, delta=1e-4)]
    page = tacit.report.compare(folders, tmp_path / "compare.html")
    found = measured(page, 375, opened=True)
    assert found["width"] <= 375, found["wide"]


def test_the_theme_follows_the_system_and_the_button(longest: Path) -> None:
    paper, night = "rgb(247, 246, 243)", "rgb(19, 21, 24)"
    found = measured(longest, 1280)
    assert found["colours"] == [paper, night, paper]
    assert found["names"] == ["Dark theme", "Light theme", "Dark theme"]
    assert not found["hidden"]
    assert found["width"] <= 1280


def test_without_scripts_everything_but_the_button_is_there(longest: Path) -> None:
    with_scripts, without = measured(longest, 1280), measured(longest, 1280, scripts=False)
    assert without["hidden"]
    assert without["words"] >= with_scripts["words"] - len("Dark theme\n")
    assert without["height"] == pytest.approx(with_scripts["height"], abs=40)


@pytest.mark.parametrize(("dark", "ground"), [(False, (247, 246, 243)), (True, (19, 21, 24))])
def test_a_screenshot_is_drawn_in_the_systems_theme(
    longest: Path, tmp_path: Path, dark: bool, ground: tuple[int, int, int]
) -> None:
    from matplotlib.image import imread

    file = tmp_path / "page.png"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    run_browser(
        scheme, "--window-size=375,800", f"--screenshot={file}",
        longest.as_uri(),
    )  # fmt: skip
    pixels = (imread(file)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (800, 375)
    assert tuple(pixels[-1, 2]) == ground
    assert len({tuple(pixel) for row in pixels[::4] for pixel in row[::4]}) > 20  # not blank
