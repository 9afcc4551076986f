"""Writes index.md: every public name of `tacit`, with the first sentence of its docstring."""

from __future__ import annotations

import inspect
from pathlib import Path

import tacit

PAGE = Path(__file__).parent / "index.md"


def page() -> str:
    lines = ["# Names", "", "Made by `python docs/api/generate.py`; do not edit by hand.", ""]
    lines += ["| name | what it is |", "|---|---|"]
    for name in sorted(tacit.__all__, key=str.lower):
        text = inspect.getdoc(getattr(tacit, name)) or ""
        first = " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")
        lines.append(f"| `tacit.{name}` | {first} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
