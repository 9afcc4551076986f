"""Which code made a figure: the commit, or the version of an installed package."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import tacit


@functools.cache
def source() -> dict[str, Any]:
    """The package's version, the commit of its checkout, and whether its code was changed since.

    `commit` and `dirty` are None where the package is not a part of a git checkout. `dirty` says
    that a Python file, tracked or not, differs from the commit, so that the commit alone does not
    name the code. Asked once per process: code that is edited later is not what runs.
    """
    package = Path(tacit.__file__).parent
    commit = None
    # Tracked: a package that is installed below somebody else's checkout is not of that checkout.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None:
        commit = _git(package, "rev-parse", "HEAD")
    changed = None if commit is None else _git(package, "status", "--porcelain", "--", ":/*.py")
    return {
        "tacit": tacit.__version__,
        "commit": commit,
        "dirty": None if changed is None else bool(changed),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
