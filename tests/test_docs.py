"""The code in the README and the docs runs, from top to bottom of each page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tacit

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`([\w./-]+\.py)`")
NAME = re.compile(r"`(tacit(?:\.\w+)+)(?=[`(])")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks_of(page: Path) -> list[str]:
    return FENCE.findall(page.read_text(encoding="utf-8"))


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks_of(p)], ids=named)
def test_code_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks_of(page):
        exec(compile(block, str(page), "exec", dont_inherit=True), namespace)
    assert "Traceback" not in capsys.readouterr().out


def test_the_quickstart_is_one_of_them() -> None:
    assert ".fit()" in "".join(blocks_of(ROOT / "README.md"))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_inside_the_project_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{named(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_pages_name_exist(page: Path) -> None:
    folders = (ROOT, ROOT / "src", ROOT / "src" / "tacit")
    for name in FILE.findall(page.read_text(encoding="utf-8")):
        if name.count("/"):  # a bare name may be a file of the reader's
            assert any((folder / name).exists() for folder in folders), f"no file {name}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "decisions"], ids=named)
def test_names_that_pages_use_exist(page: Path) -> None:
    for name in NAME.findall(page.read_text(encoding="utf-8")):
        found: object = tacit
        for part in name.split(".")[1:]:
            assert hasattr(found, part), f"{named(page)} names {name}"
            found = getattr(found, part)


def test_no_text_is_a_placeholder() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        assert "@@" not in page.read_text(encoding="utf-8"), named(page)


def test_the_api_reference_is_up_to_date() -> None:
    folder = ROOT / "docs" / "api"
    namespace: dict[str, object] = {"__name__": "generate", "__file__": str(folder / "generate.py")}
    exec((folder / "generate.py").read_text(encoding="utf-8"), namespace)
    made = namespace["pages"]()  # type: ignore[operator]
    there = {page.name: page.read_text(encoding="utf-8") for page in folder.glob("*.md")}
    changed = [name for name in {*made, *there} if made.get(name) != there.get(name)]
    assert not changed, f"{changed} differ; run: python docs/api/generate.py"
    assert "|  |" not in made["index.md"], "a public name has no docstring"
