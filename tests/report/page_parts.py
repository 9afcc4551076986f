"""A page read back with the standard library's parser: elements, ids, texts and tables."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br", "col"}


class PageReader(HTMLParser):
    """Raises AssertionError where elements do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []  # what is shown: neither styles nor scripts
        self.tables: dict[str, list[list[str]]] = {}  # by their captions
        self._open: list[str] = []
        self._row: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"{self._open} are not closed"

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        assert len(dict(attributes)) == len(attributes), f"an attribute of {name} comes twice"
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self._open.append(name)
        if name == "tr":
            self._row = []
        if name in ("td", "th"):
            self._row.append("")

    def handle_endtag(self, name: str) -> None:
        assert self._open, f"{name} was never open"
        assert self._open.pop() == name, f"{name} closes out of order"
        if name == "tr":
            self.tables[self._caption].append(self._row)

    def handle_data(self, data: str) -> None:
        if "style" in self._open or "script" in self._open:
            return
        self.words.append(data)
        if "caption" in self._open:
            self._caption = data
            self.tables[data] = []
        elif self._open and self._open[-1] in ("td", "th") and self._row:
            self._row[-1] += data

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for element, attributes in self.elements if element == name]

    @property
    def shown(self) -> str:
        return " ".join(" ".join(self.words).split())


def read_page(path: Path) -> PageReader:
    return PageReader(path.read_text(encoding="utf-8"))
