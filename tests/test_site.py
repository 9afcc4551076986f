"""The documentation as a site: it builds without a warning, and its notebooks run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs tacit[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {p.relative_to(ROOT / "docs").with_suffix("") for p in (ROOT / "docs").rglob("*.md")}
    built = {p.relative_to(site).with_suffix("") for p in site.rglob("*.html")}
    pages = {p.with_name("index") if p.name == "README" else p for p in pages}
    assert pages <= built, f"missing: {sorted(map(str, pages - built))}"


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    fetched = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="(https?:[^"]*)|<link[^>]*rel="(?:style'
                         r'sheet|preconnect)"[^>]*href="(https?:[^"]*)')  # fmt: skip
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text(encoding="utf-8")), page.name


def test_links_that_leave_the_docs_are_paths(site: Path) -> None:
    text = (site / "results.html").read_text(encoding="utf-8")
    assert "benchmarks/records/" in text
    assert 'href="../benchmarks' not in text


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs tacit[docs]")
    client = pytest.importorskip("nbclient", reason="needs tacit[docs]")
    content = nbformat.read(notebook, as_version=4)
    given = [cell.get("outputs") for cell in content.cells if cell.cell_type == "code"]
    assert any(given), "a notebook is stored with what it prints"
    client.NotebookClient(
        content, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 3
