"""What the site needs beside Markdown: lists of generated pages, and links that leave the docs.

Pages link to records, sources and the change log, which are read in the repository and are not part
of the site. There such a link becomes the path as text, so that the site has no dead links.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_DOCS = _ROOT / "docs"
_TARGET = r"(?P<target>[^)\s#:]+)(?:#[^)\s]*)?"
_LINK = re.compile(rf"\[(?P<text>[^\]]*)\]\({_TARGET}\)")
_DEFINITION = re.compile(rf"^\[(?P<name>[^\]]+)\]: {_TARGET}$", re.MULTILINE)


def on_config(config: Any, **_: Any) -> Any:
    """List every page of the API and every decision in the navigation. Called by mkdocs."""

    def complete(entries: list[Any]) -> None:
        for entry in entries:
            for inner in entry.values() if isinstance(entry, dict) else ():
                if isinstance(inner, list):
                    complete(inner)
        for first in [e for e in entries if e in ("api/index.md", "decisions/README.md")]:
            folder = _DOCS / Path(first).parent
            pages = sorted(page.relative_to(_DOCS).as_posix() for page in folder.glob("*.md"))
            entries += [page for page in pages if page != first]

    complete(config["nav"])
    return config


def on_post_build(config: Any, **_: Any) -> None:
    """Publish the schema of privacy statements beside the pages. Called by mkdocs."""
    shutil.copy(_ROOT / "src/tacit/report/statement.schema.json", config["site_dir"])


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with paths in the place of links that leave the docs. Called by mkdocs."""
    folder = (_DOCS / page.file.src_uri).parent

    def inline(match: re.Match[str]) -> str:
        path = _outside(folder, match["target"])
        if path is None:
            return match[0]
        text = match["text"].strip("`")
        return f"`{path}`" if path.rstrip("/").endswith(text) else f"{match['text']} (`{path}`)"

    markdown = _LINK.sub(inline, markdown)
    for match in _DEFINITION.finditer(markdown):
        path = _outside(folder, match["target"])
        if path is not None:  # [text][a] and [a] lead to a line at the end of the page
            name = match["name"]
            markdown = markdown.replace(match[0], f"- ({name}) `{path}`")
            markdown = re.sub(rf"\[([^\]\[]+)\]\[{name}\]", rf"\1 ({name})", markdown)
            markdown = markdown.replace(f"[{name}]", f"({name})")
    return markdown


def _outside(folder: Path, target: str) -> str | None:
    """The path from the repository's root, if the target exists and is not in the docs."""
    path = (folder / target).resolve()
    if path.is_relative_to(_DOCS) or not path.exists():
        return None
    return path.relative_to(_ROOT).as_posix() + ("/" if path.is_dir() else "")
