"""How the sources are arranged: imports go forwards, names are said once."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import tacit

SOURCE = Path(tacit.__file__).parent

# In the order in which data flows. A package imports from those before it and from no other.
PACKAGES = [
    "errors",
    "budget",
    "torch_internals",
    "precision",
    "pytrees",
    "canvas",
    "ranks",
    "randomness_cuda",
    "randomness",
    "sources",
    "columns",
    "prefetch",
    "records",
    "sampling",
    "accounting",
    "ledger",
    "data",
    "losses",
    "checks",
    "engines",
    "lipschitz",
    "certificates",
    "models",
    "statistics",
    "queries",
    "noise",
    "mechanism",
    "training",
    "auditing",
    "diagnostics",
    "report",
    "integrations",
    "cli",
]


@cache
def modules() -> dict[str, Path]:
    def name(path: Path) -> str:
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    return {name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def package_of(module: str) -> str:
    return module.split(".")[1]


@cache
def imports(module: str) -> frozenset[tuple[str, bool]]:
    """The modules of ours that a module imports, wherever it does; and if for annotations alone."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tacit":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add((whole if whole in modules() else node.module, node in for_types))
        elif isinstance(node, ast.Import):
            found |= {(a.name, False) for a in node.names if a.name.split(".")[0] == "tacit"}
    return frozenset(found)


INNER = [name for name in modules() if name not in ("tacit", "tacit.__main__")]


@pytest.mark.parametrize("module", INNER)
def test_imports_go_forwards(module: str) -> None:
    own = PACKAGES.index(package_of(module))
    for imported, _ in imports(module):
        if imported != "tacit":
            later = PACKAGES.index(package_of(imported)) > own
            assert not later, f"{module} imports {imported}, which comes after it"


def test_there_are_no_cycles() -> None:
    """Imports for annotations may go both ways within a package, and nowhere else."""
    depends = {
        m: {i for i, types in imports(m) if i in modules() and not (types and same_package(m, i))}
        for m in INNER
    }
    while ready := [m for m, needs in depends.items() if not needs & depends.keys() - {m}]:
        for module in ready:
            del depends[module]
    assert not depends, f"these import each other: {sorted(depends)}"


def test_the_architecture_page_lists_the_packages_in_this_order() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    listed = [name.rstrip("/") for row in rows for name in re.findall(r"`(\w+/?)`", row)]
    assert listed == [name for name in PACKAGES if any(package_of(m) == name for m in INNER)]


def same_package(one: str, other: str) -> bool:
    return package_of(one) == package_of(other)


def test_no_two_modules_share_a_name() -> None:
    leaves = Counter(m.rpartition(".")[2] for m in INNER if modules()[m].name != "__init__.py")
    assert not [name for name, count in leaves.items() if count > 1]


def test_no_two_public_classes_share_a_name() -> None:
    found = Counter(
        node.name
        for module in INNER
        for node in ast.parse(modules()[module].read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in found.items() if count > 1]


def test_every_package_says_what_it_is_for() -> None:
    for module in INNER:
        if modules()[module].name == "__init__.py":
            assert importlib.import_module(module).__doc__, module


def test_public_names_are_what_type_checkers_see() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == sorted(tacit.__all__)
    for name, module in seen.items():
        assert getattr(tacit, name) is getattr(importlib.import_module(str(module)), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tacit.nothing


@pytest.mark.parametrize("package", ["training", "report"])
def test_packages_that_import_when_used_have_the_names_that_type_checkers_see(package) -> None:
    tree = ast.parse((SOURCE / package / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    found = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: str(node.module) for node in found for alias in node.names}
    own = importlib.import_module(f"tacit.{package}")
    assert sorted(seen) == sorted(own.__all__)
    for name, module in seen.items():
        assert getattr(own, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = own.nothing


def test_predicting_waits_for_no_accounting_and_no_training(tmp_path: Path) -> None:
    made = (
        "train", "--steps", "1", "--noise-multiplier", "9", "--quiet", "--delta", "1e-4",
        "--out", str(tmp_path / "x"),
    )  # fmt: skip
    subprocess.run([sys.executable, "-m", "tacit", *made], check=True, capture_output=True)
    code = f"""
import atexit, sys
from tacit.cli import main
run, out = {str(tmp_path / "x")!r}, {str(tmp_path / "p.csv")!r}
late = "dp_accounting", "matplotlib", "tacit.training.trainer", "tacit.ledger", "tacit.report.page"
atexit.register(lambda: print([name for name in late if name in sys.modules]))
main(["predict", run, "--dataset", "digits", "--out", out])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def seconds(code: str) -> float:
    def once() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - began

    return min(once() for _ in range(3))


def test_importing_tacit_is_about_as_fast_as_importing_torch() -> None:
    assert seconds("import tacit") <= 1.3 * seconds("import torch")
