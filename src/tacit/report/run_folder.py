"""A finished run as a folder: run.json, weights, preprocessing and a picture of its progress."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import tacit
from tacit.canvas import blank
from tacit.data.preprocessing import FILE as PREPROCESSING
from tacit.data.preprocessing import Preprocessing, Stage
from tacit.diagnostics.predictions import confusion_matrix
from tacit.records import Records
from tacit.statistics.tracking import refuse_private_statistics
from tacit.training.run import Run

# What a run writes into its folder.
FILES = ("run.json", "weights.safetensors", "progress.png", PREPROCESSING)


@functools.cache
def source() -> dict[str, Any]:
    """The package's version, the commit of its checkout, and whether its code was changed since.

    `commit` and `dirty` are None where the package is not part of a git checkout. `dirty` says
    that a Python file, tracked or not, differs from the commit, so that the commit alone does not
    name the code. Read once per process: code that is edited later is not what runs.
    """
    package = Path(tacit.__file__).parent
    commit = None
    # A package that is installed below another project's checkout is not tracked there.
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
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


# The metric that is drawn beside the loss, by preference: its label, and its factor.
_BESIDE = {
    "accuracy": ("held-out accuracy (%)", 100),
    "root_mean_squared_error": ("held-out RMSE", 1),
}


def plot_history(facts: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """The held-out loss at each evaluation against the ε spent by then, beside the accuracy or,
    for a regression, the root mean squared error."""
    history = facts["history"]
    epsilons = [point["epsilon"] for point in history]
    beside = next((m for m in _BESIDE if all(p.get(m) is not None for p in history)), None)
    figure, axes = blank(1, 2 if beside else 1, (9 if beside else 4.8, 3.6))
    *first, loss = axes[0]
    if beside:
        label, times = _BESIDE[beside]
        values = [times * point[beside] for point in history]
        first[0].plot(epsilons, values, marker="o", markersize=3)
        first[0].set_ylabel(label)
    loss.plot(epsilons, [p["loss"] for p in history], marker="o", markersize=3, color="tab:red")
    loss.set_ylabel("held-out loss")
    for panel in (*first, loss):
        panel.set_xlabel(f"ε spent (PLD, δ = {facts['delta']:g}, {facts['relation']})")
        panel.grid(alpha=0.3)
    figure.suptitle(f"{facts['sampling']}, noise multiplier {facts['noise_multiplier']:.4g}")
    figure.savefig(path, dpi=120)


def environment() -> dict[str, Any]:
    """The commit and the versions that a figure depends on."""
    return {
        **source(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "scipy": version("scipy"),
        "dp_accounting": version("dp-accounting"),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": sys.argv,
    }


def save_run(
    run: Run,
    folder: str | os.PathLike[str],
    test: Records | None = None,
    *,
    overwrite: bool = False,
    preprocessing: Preprocessing | Stage | Iterable[Stage] | None = None,
) -> dict[str, Any]:
    """Write the run into `folder` and return its facts. Files appear whole or not at all.

    `preprocessing` is what the inputs went through: the scalers given to `tacit.load`, a released
    mean and std, scattering features. `load_preprocessing(folder)` reads it back.

    A run that is there already is kept, and ValueError raised, unless `overwrite`; other files,
    such as a ledger, are left alone. Raises PrivateStatistics, and writes nothing, if the model
    holds private statistics.
    """
    refuse_private_statistics(run.model)
    target = Path(folder)
    # Without one of its own, a run must not replace preprocessing that another has paid for.
    kept = FILES if preprocessing is None else FILES[:-1]
    if not overwrite and any((target / name).exists() for name in kept):
        raise ValueError(
            f"folder {str(target)!r} holds a run already; give another folder, or overwrite=True"
        )
    target.mkdir(parents=True, exist_ok=True)
    facts = run.facts(test)
    facts["environment"] = environment()
    facts["confusion"] = _confusion(run, test, facts)
    # Copies, since safetensors refuses the shared memory of tied weights.
    weights = {
        name: torch.clone(tensor.detach().cpu(), memory_format=torch.contiguous_format)
        for name, tensor in run.model.state_dict().items()
    }
    temporary = target / "weights.safetensors.tmp"
    save_file(weights, temporary)
    os.replace(temporary, target / "weights.safetensors")
    if preprocessing is None:
        (target / PREPROCESSING).unlink(missing_ok=True)  # of a run that is overwritten
    else:
        Preprocessing.of(preprocessing).save(target)
    if run.history:
        plot_history(facts, target / "progress.png")
    else:
        (target / "progress.png").unlink(missing_ok=True)  # of a run that is overwritten
    write_json(facts, target / "run.json")
    return facts


# A matrix of more classes is no picture, and long as JSON.
_MOST_CLASSES = 40


def _confusion(run: Run, test: Records | None, facts: dict[str, Any]) -> list[list[int]] | None:
    """Counts of the held-out records, a row for each true class; None where there are no classes.

    What the records are measured on is not covered by ε, as their accuracy is not.
    """
    if test is None or facts["accuracy"] is None or (test.num_classes or 2) > _MOST_CLASSES:
        return None
    with suppress(ValueError):  # several targets per record, or several tensors of outputs
        counts: list[list[int]] = confusion_matrix(run.model, test).tolist()
        return counts if len(counts) <= _MOST_CLASSES else None
    return None


def write_json(facts: dict[str, Any], path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(to_json(facts) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def to_json(value: Any) -> str:
    """JSON that any reader takes: an infinite ε is the string "inf", which JSON numbers lack."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | bool | str | None) else str(value)
