"""Writes the API reference: `index.md`, and one page per package with every public object of it.

Run it after a public name or docstring has changed: `python docs/api/generate.py`.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import tacit

FOLDER = Path(__file__).parent
NOTE = "Made by `python docs/api/generate.py` from the docstrings; do not edit by hand."
ENTRIES = ("Args", "Attributes", "Raises")
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|Guarantee):$")


def packages() -> dict[str, ModuleType]:
    """The packages and modules that hold public names, by their names without `tacit.`."""
    found = {name: getattr(tacit, name) for name in tacit.__all__}
    modules = {name: value for name, value in found.items() if isinstance(value, ModuleType)}
    for name, value in found.items():
        if not isinstance(value, ModuleType):
            package = tacit._MODULE_OF[name].split(".")[1]
            modules[package] = importlib.import_module(f"tacit.{package}")
    modules["integrations"] = importlib.import_module("tacit.integrations")
    return dict(sorted(modules.items()))


def public_names(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None)
    if names is None:
        own = {n: v for n, v in vars(module).items() if not n.startswith("_")}
        names = [n for n, v in own.items() if getattr(v, "__module__", "") == module.__name__]
    return sorted(names, key=str.lower)


@functools.cache
def syntax_of(module: str) -> ast.Module:
    return ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))


def docstring(value: Any) -> str:
    """A docstring as the source has it, less its margin.

    `inspect.getdoc` also takes the indentation of a text that is nothing but an example.
    """
    inner = value.fget if isinstance(value, property) else value
    node: ast.AST = syntax_of(inner.__name__ if isinstance(inner, ModuleType) else inner.__module__)
    names = [] if isinstance(inner, ModuleType) else inner.__qualname__.split(".")
    kinds = (ast.ClassDef, ast.FunctionDef)
    for name in names:
        body = [n for n in getattr(node, "body", []) if isinstance(n, kinds) and n.name == name]
        if not body:  # made by a decorator
            return inspect.getdoc(value) or ""
        node = body[-1]
    text = ast.get_docstring(node, clean=False)  # type: ignore[arg-type]
    if text is None:
        return "" if names[-1:] == ["__call__"] else inspect.getdoc(value) or ""
    margin = " " * node.body[0].col_offset  # type: ignore[attr-defined]
    return "\n".join(line.removeprefix(margin) for line in text.split("\n")).strip()


def summary(value: Any) -> str:
    """The first paragraph of a docstring, on one line of a table."""
    return " ".join(docstring(value).split("\n\n")[0].split()).replace("|", "\\|")


class Plain(str):
    """An annotation that is printed as it stands in the source, without quotes."""

    __repr__ = str.__str__


def signature_of(name: str, value: Any) -> str:
    """How it is called: one line, or one line per parameter where that would be too long."""
    if inspect.isclass(value) and issubclass(value, enum.Enum | BaseException):
        return name
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    plain = [
        p.replace(annotation=Plain(p.annotation) if isinstance(p.annotation, str) else p.annotation)
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    returned = signature.return_annotation
    ending = f" -> {returned}" if isinstance(returned, str) and returned != "None" else ""
    whole = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
    text = f"{name}{whole}{ending}"
    if len(text) > 100:
        inner = str(whole)[1:-1]
        text = f"{name}(\n    {_split(inner)},\n){ending}"
    text = re.sub(r"<object object at 0x[0-9a-f]+>", "...", text)
    text = re.sub(r"<(\w+\.\w+): '[^']*'>", r"\1", text)
    text = re.sub(r"<function ([\w.]+?)(?:\.<locals>\.\w+)? at 0x[0-9a-f]+>", r"\1(...)", text)
    return re.sub(r"<class '([\w.]+)'>", r"\1", text)


def _split(parameters: str) -> str:
    """Parameters on lines of their own: at the commas that no bracket encloses."""
    depth, found = 0, ""
    for character in parameters:
        depth += character in "([{"
        depth -= character in ")]}"
        found += ",\n   " if character == "," and depth == 0 else character
    return found


def formatted(text: str) -> str:
    """A docstring as Markdown: named sections become bold lines, their entries lists."""
    lines, section = [], None
    for line in text.split("\n"):
        heading = SECTION.match(line)
        if heading:
            section = heading[1]
            lines += [f"**{section}**", ""]
        elif section in ENTRIES and re.match(r"^ {4}\S", line):
            name, colon, rest = line.strip().partition(":")
            lines.append(f"- `{name}`:{rest}" if colon else f"- {line.strip()}")
        elif section and line and not line.startswith(" "):
            section = None
            lines += ["", line]
        else:
            lines.append(line.removeprefix("    ") if section in ENTRIES else line)
    return "\n".join(lines).rstrip()


def methods_of(kind: type) -> list[tuple[str, Any]]:
    """Public methods and properties that a class defines and documents."""
    found = []
    for name, value in vars(kind).items():
        inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        method = inspect.isfunction(inner) or isinstance(inner, property)
        # How a protocol is called is what its implementations need.
        wanted = not name.startswith("_") or (name == "__call__" and is_protocol(kind))
        if wanted and method and (summary(inner) or is_protocol(kind)):
            found.append((name, inner))
    return found


def is_protocol(kind: type) -> bool:
    return getattr(kind, "_is_protocol", False)


def entry(name: str, value: Any) -> list[str]:
    lines = [f"## {name}", ""]
    if callable(value) and not (inspect.isclass(value) and is_protocol(value)):
        lines += ["```text", signature_of(name, value), "```", ""]
    lines += [formatted(docstring(value)), ""]
    if inspect.isclass(value):
        if issubclass(value, enum.Enum):
            lines += [f"- `{member}`" for member in value]
        for method, inner in methods_of(value):
            called = method if isinstance(inner, property) else signature_of(method, inner)
            one_line = " ".join(called.split()).replace("( ", "(").replace(", )", ")")
            lines += [f"- `{one_line}`: {summary(inner)}".removesuffix(": ")]
        lines += [""] if methods_of(value) else []
    return lines


def package_page(package: str, module: ModuleType) -> str:
    lines = [f"# tacit.{package}", "", NOTE, "", formatted(docstring(module)), ""]
    for name in public_names(module):
        value = getattr(module, name)
        if not isinstance(value, ModuleType) and callable(value):
            lines += entry(name, value)
    return "\n".join(lines).rstrip() + "\n"


def index_page() -> str:
    lines = ["# API", "", NOTE, "", "| name | what it is |", "|---|---|"]
    for name in sorted(tacit.__all__, key=str.lower):
        value = getattr(tacit, name)
        module = isinstance(value, ModuleType)
        package = name if module else tacit._MODULE_OF[name].split(".")[1]
        anchor = "" if module else f"#{name.lower()}"
        lines.append(f"| [`tacit.{name}`]({package}.md{anchor}) | {summary(value)} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """The text of every page, by file name."""
    made = {
        f"{package}.md": package_page(package, module) for package, module in packages().items()
    }
    return {"index.md": index_page(), **made}


if __name__ == "__main__":
    for old in FOLDER.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
